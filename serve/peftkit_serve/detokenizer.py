"""Token ids to text, one token at a time, such that the pieces joined are what decoding all ids at once gives.

Three things make the text of a token depend on its neighbours: a character of several bytes may lie across tokens, a
run of byte tokens (`<0x0A>`, in sentencepiece vocabularies) is decoded as one, and the first token's space is
dropped. So a window of tokens is decoded, its first part only as context, and text is held back while it may change:

    ids    … | context: already text | new: held while it ends inside a character or a run of bytes |
    text   … released | held: may be the beginning of a stop string |

A token costs the same however many came before it: the window is short, and of a stop string no more is remembered
than how much of it the text ends with.
"""

from collections.abc import Sequence

from peftkit_serve.vocabulary import REPLACEMENT, Vocabulary

_MOST_UNFINISHED = 8
"""Tokens that are held for a character's sake: it has at most four bytes, and a token at least one. What is no
character by then, a model's broken bytes, is text but for its last, which may still become one."""


class Detokenizer:
    """The text of one request. Special tokens are skipped; text ends before the stop string that is complete first."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stop = [_Begun(one) for one in stop]
        self._ids: list[int] = []
        self._context = 0  # the window begins here …
        self._new = 0  # … and from here on it is not text yet
        self._context_text = ""
        self._holds = False
        """Whether a token, or a part of one, isn't text yet."""
        self._text = ""
        self._num_released = 0
        self.stopped = False
        """Whether a stop string was found. Nothing may be pushed after it."""

    @property
    def text(self) -> str:
        """All text released so far."""
        return self._text[: self._num_released]

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that it releases: whole characters that no stop string can claim."""
        assert not self.stopped
        whole = None if self._holds else self._vocabulary.whole(token_id)
        if whole is not None:  # most tokens of a byte-level vocabulary
            if whole:
                self._context, self._context_text = self._new, whole
                self._ids.append(token_id)
                self._new += 1
                self._append(whole)
        elif not self._decode(token_id):
            return ""
        return self._release(max(one.length for one in self._stop) if self._stop else 0)

    def flush(self) -> str:
        """Ends the text and returns what was held back, up to a stop string if that completes one."""
        if self.stopped:
            return ""
        self._take(self._vocabulary.text(self._ids[self._context :]), False)
        return self._release(0)

    def _decode(self, token_id: int) -> bool:
        """Adds a token that depends on those beside it; whether the text goes on."""
        if self._vocabulary.is_silent(token_id):
            return False
        self._holds = True
        self._ids.append(token_id)
        if self._vocabulary.is_byte(token_id):
            return False  # undecoded: the run goes on for as long as it likes
        window = self._vocabulary.text(self._ids[self._context :])
        if len(window) <= len(self._context_text):
            return False
        unfinished = window.endswith(REPLACEMENT)
        if unfinished and len(self._ids) - self._new < _MOST_UNFINISHED:
            return False
        self._take(window, unfinished)
        return True

    def _take(self, window: str, unfinished: bool) -> None:
        """Turns the window's new part into text, all but its last character if that is unfinished, and moves it on."""
        end = len(window) - unfinished
        self._append(window[len(self._context_text) : end])
        self._context, self._new = self._new, len(self._ids)
        self._holds = unfinished
        context_text = self._vocabulary.text(self._ids[self._context :])
        self._context_text = context_text.removesuffix(REPLACEMENT) if unfinished else context_text

    def _append(self, piece: str) -> None:
        """Adds to the text, up to the stop string that is complete first."""
        if not self._stop:
            self._text += piece
            return
        for number, character in enumerate(piece, 1):
            found = [len(one.stop) for one in self._stop if one.follow(character)]
            if found:
                self.stopped = True
                self._text = (self._text + piece[:number])[: -max(found)]
                return
        self._text += piece

    def _release(self, num_held: int) -> str:
        end = len(self._text) - (0 if self.stopped else num_held)
        piece = self._text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return piece


class _Begun:
    """How much of a stop string a text ends with, one character after the other (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """Characters of the longest end of the text that begins the stop string."""
        self._borders = [0]
        """Of each beginning, as far as it was needed: characters of the longest one that it also ends with."""

    def follow(self, character: str) -> bool:
        """Goes on by a character; whether the stop string is complete."""
        self.length = self._longer(self.length, character)
        if self.length > len(self._borders):
            self._borders.append(self._longer(self._borders[-1], character))
        return self.length == len(self.stop)

    def _longer(self, length: int, character: str) -> int:
        """Where a text that ends with the first `length` characters is after one more."""
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + (self.stop[length] == character)
