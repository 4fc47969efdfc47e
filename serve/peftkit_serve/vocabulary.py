"""What single tokens are: their text, their bytes, and where each begins in the text that they make together."""

from tokenizers import Tokenizer, decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""
_BYTES = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
"""The byte of each symbol in a byte-level vocabulary (GPT-2's)."""


class Vocabulary:
    """What is asked of a tokenizer for each token: transformers' own decode costs ten times as much."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        named = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        self._byte_of = {id: byte for id, byte in named.items() if id is not None}
        self._joins_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._whole: dict[int, str | None] = {}

    def text(self, ids: list[int], *, special: bool = False) -> str:
        """Ids as text, with special tokens or without."""
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def whole(self, id: int) -> str | None:
        """What a token adds to a text that ends with a whole character, if that is the same behind any such text."""
        if not self._joins_bytes:
            return None
        if id not in self._whole:
            text = "" if self.is_silent(id) else self.text([id])
            self._whole[id] = None if REPLACEMENT in text else text
        return self._whole[id]

    def is_silent(self, id: int, *, special: bool = False) -> bool:
        """Whether a token is never text: an id that the base has and its tokenizer hasn't, or a special one."""
        return (id in self._special and not special) or self._tokenizer.id_to_token(id) is None

    def is_byte(self, id: int) -> bool:
        """Whether a token is one of those that are decoded in runs."""
        return id in self._byte_of

    def word(self, id: int) -> str:
        """A token by itself as text, a special one too; part of a character is U+FFFD."""
        text = self.text([id], special=True)
        begins = (self._tokenizer.id_to_token(id) or "").startswith("\u2581")  # alone it would lose its space
        return f" {text}" if begins and not text.startswith(" ") else text

    def bytes(self, id: int) -> list[int] | None:
        """A token's bytes, those of a part of a character too; None where its tokenizer doesn't say them."""
        if id in self._byte_of:
            return [self._byte_of[id]]
        word, piece = self.word(id), self._tokenizer.id_to_token(id) or ""
        if REPLACEMENT not in word:
            return list(word.encode())
        if not all(symbol in _BYTES for symbol in piece):
            return None
        spelt = [_BYTES[symbol] for symbol in piece]
        return spelt if bytes(spelt).decode(errors="replace") == word else None


class Places:
    """Where each of a text's tokens begins in it. A token that goes on with a character begins where that does."""

    _LONG, _LONGEST, _KEPT = 24, 512, 8

    def __init__(self, vocabulary: Vocabulary, start: int = 0, *, special: bool = False) -> None:
        """
        start: characters that stand before the first token.
        special: whether special tokens are in the text.
        """
        self._vocabulary, self._special = vocabulary, special
        self._before = start
        self._ids: list[int] = []
        self._text = ""

    @property
    def end(self) -> int:
        """Characters of the text so far, what stands before it included."""
        return self._before + len(self._text)

    def next(self, id: int) -> int:
        """Adds a token and returns where it begins."""
        if self._vocabulary.is_silent(id, special=self._special):
            return self.end - self._text.endswith(REPLACEMENT)  # perhaps in the middle of a character
        self._ids.append(id)
        text = self._vocabulary.text(self._ids, special=self._special)
        common = _num_common(self._text, text)
        if common == len(text) and text.endswith(REPLACEMENT):
            common -= 1  # a character that is still not whole
        place, self._text = self._before + common, text
        if len(self._ids) >= self._LONG:
            self._forget()
        return place

    def _forget(self) -> None:
        """Keeps no more tokens than the next one's text can depend on: not a part of a run of bytes, if it ends."""
        kept = len(self._ids) - self._KEPT
        while kept and self._vocabulary.is_byte(self._ids[kept]):
            kept -= 1
        if kept or len(self._ids) >= self._LONGEST:
            self._ids = self._ids[kept or -self._KEPT :]
            text = self._vocabulary.text(self._ids, special=self._special)
            self._before += len(self._text) - len(text)
            self._text = text


def _num_common(one: str, other: str) -> int:
    """Characters with which both begin."""
    differing = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
