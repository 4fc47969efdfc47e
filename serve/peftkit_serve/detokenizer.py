"""Token ids to text, one token at a time, such that the pieces joined are what decoding all ids at once gives.

Three things make the text of a token depend on its neighbours: a character of several bytes may lie across tokens, a
run of byte tokens (`<0x0A>`, in sentencepiece vocabularies) is decoded as one, and the first token's space is
dropped. So a window of tokens is decoded, its first part only as context, and text is held back while it may change:

    ids    … | context: already text | new: held while it ends inside a character or a run of bytes |
    text   … released | held: may be the beginning of a stop string |
"""

import re
from collections.abc import Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What is used of a `tokenizers.Tokenizer`: transformers' own decode costs ten times as much."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def id_to_token(self, id: int) -> str | None: ...


class Detokenizer:
    """The text of one request. Special tokens are skipped; text ends before the stop string that is complete first."""

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # the window begins here …
        self._new = 0  # … and from here on it is not text yet
        self._context_text = ""
        self._window_text = ""
        self._in_bytes = False
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
        self._ids.append(token_id)
        window = self._tokenizer.decode(self._ids[self._context :])
        if window != self._window_text:  # a skipped special token doesn't end a run of bytes
            self._in_bytes = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None
            self._window_text = window
        if self._in_bytes or len(window) <= len(self._context_text) or window.endswith(_REPLACEMENT):
            return ""
        self._take_window()
        return self._release(self._num_held())

    def flush(self) -> str:
        """Ends the text and returns what was held back, up to a stop string if that completes one."""
        if self.stopped:
            return ""
        self._take_window()
        return self._release(0)

    def _take_window(self) -> None:
        """Turns the window's new part into text, looks for a stop string in it, and moves the window on."""
        old = len(self._text)
        self._text += self._window_text[len(self._context_text) :]
        self._context, self._new = self._new, len(self._ids)
        self._context_text = self._window_text = self._tokenizer.decode(self._ids[self._context :])
        found: list[tuple[int, int]] = []
        for stop in self._stop:
            start = self._text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.stopped = True
            self._text = self._text[: min(found)[1]]

    def _num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self.stopped or not self._stop:
            return 0
        most = min(max(map(len, self._stop)) - 1, len(self._text))
        tails = (self._text[len(self._text) - length :] for length in range(most, 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stop)), 0)

    def _release(self, num_held: int) -> str:
        end = len(self._text) - num_held
        piece = self._text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return piece
