"""Incremental text: pieces joined equal one-shot decoding, characters stay whole, stop strings never leak."""

import os
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peftkit_serve.detokenizer import Detokenizer
from peftkit_serve.vocabulary import Places, Vocabulary


def byte_level() -> PreTrainedTokenizerFast:
    """256 bytes, some merged pairs, one special token: as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = [(a, b) for a in alphabet[:20] for b in alphabet[-20:]]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Pieces with ▁ and the 256 byte tokens behind them: as Llama 2 and Mistral have it."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "é",
        "▁a",
        "▁the",
        "the",
        "▁▁",
        ".",
        "▁.",
    ]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def one_shot(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def byte_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids that spell `text` byte by byte."""
    if tokenizer is TOKENIZERS["byte_fallback"]:
        return [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in text.encode()]
    symbols = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c)[0][0] for c in text]
    return [tokenizer.get_vocab()[symbol] for symbol in "".join(symbols)]


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(pieces)
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.flush()]


def test_random_ids_join_to_the_one_shot_text(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 40))]
        assert "".join(stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), ids)) == one_shot(tokenizer, ids)


def test_pieces_with_spaces_and_specials_join_to_the_one_shot_text(seed: int) -> None:
    tokenizer, rng = TOKENIZERS["byte_fallback"], random.Random(seed)
    pieces = [*range(256, len(tokenizer)), 11, 196, 170]
    for _ in range(500):
        ids = [rng.choice(pieces) for _ in range(rng.randint(1, 20))]
        assert "".join(stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), ids)) == one_shot(tokenizer, ids)


def test_a_character_is_never_emitted_in_halves(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "né 你好 🙂🏽 x"
    pieces = stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), byte_ids(tokenizer, text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_text_streams_as_soon_as_a_character_is_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), byte_ids(tokenizer, "aé!")) == [
        "a",
        "",
        "é",
        "!",
        "",
    ]


def test_an_end_inside_a_character_shows_what_one_shot_decoding_shows(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_ids(tokenizer, "a🙂")[:-2]
    assert "".join(stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), ids)) == one_shot(tokenizer, ids)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["lo w"], "hel"),
        (["world", "o"], "hell"),
        (["xyz"], "hello world"),
        (["world!"], "hello world"),
        (["hello"], ""),
        (["d"], "hello worl"),
        (["llo world", "wo"], "hello "),
        (["lo", "ello w"], "hel"),
    ],
)
def test_text_ends_before_the_stop_string_that_is_complete_first(stop: list[str], expected: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = byte_ids(tokenizer, "hello world")
    detokenizer = Detokenizer(Vocabulary(tokenizer.backend_tokenizer), stop)
    assert "".join(stream(detokenizer, ids)) == expected
    assert detokenizer.stopped == (expected != "hello world")


def test_nothing_of_a_possible_stop_string_is_streamed_early(seed: int) -> None:
    tokenizer, rng = TOKENIZERS["byte_level"], random.Random(seed)
    for _ in range(400):
        stops = ["".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abé", k=30))
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        detokenizer = Detokenizer(Vocabulary(tokenizer.backend_tokenizer), stops)
        streamed = "".join(stream(detokenizer, byte_ids(tokenizer, text)))
        if not ends:
            assert streamed == text and not detokenizer.stopped
            continue
        first = min(ends)
        longest = max(len(stop) for stop in stops if text[:first].endswith(stop))
        assert streamed == text[: first - longest] and detokenizer.stopped


def test_held_text_is_released_as_soon_as_it_cannot_become_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer), ["abc"]), byte_ids(tokenizer, "xababd")) == [
        "x",
        "",
        "",
        "ab",
        "",
        "abd",
        "",
    ]


def test_a_stop_string_that_only_the_end_completes_still_cuts(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_ids(tokenizer, "a\n")
    detokenizer = Detokenizer(Vocabulary(tokenizer.backend_tokenizer), ["\n"])
    assert "".join(stream(detokenizer, ids)) == "a" and detokenizer.stopped


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_broken_characters_special_and_unknown_tokens_join_to_the_one_shot_text(kind: str, seed: int) -> None:
    tokenizer, rng = TOKENIZERS[kind], random.Random(seed)
    odd = byte_ids(tokenizer, "é你🙂")
    odd += [tokenizer.eos_token_id, len(tokenizer) + 5] * 2
    if kind == "byte_level":  # merged pairs: the end of a character with the beginning of the next
        odd += range(256, len(tokenizer) - 1, 40)
    for _ in range(300):
        ids = rng.choices(odd, k=rng.randint(1, 80))
        pieces = stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), ids)
        assert "".join(pieces) == one_shot(tokenizer, ids)


def test_a_model_that_writes_broken_bytes_is_streamed_all_the_same() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = byte_ids(tokenizer, "é")[1:] * 100
    pieces = stream(Detokenizer(Vocabulary(tokenizer.backend_tokenizer)), ids)
    assert "".join(pieces) == "\ufffd" * 100 and len(pieces[-1]) < 10


class Counting(Vocabulary):
    """Counts the tokens that it turns into text."""

    num_decoded = 0

    def text(self, ids: list[int], *, special: bool = False) -> str:
        self.num_decoded += len(ids)
        return super().text(ids, special=special)


@pytest.mark.parametrize(
    ("kind", "repeated"),
    [
        ("byte_level", lambda t: byte_ids(t, "a")),
        ("byte_level", lambda t: byte_ids(t, "é")[1:]),
        ("byte_level", lambda t: [t.eos_token_id]),
        ("byte_fallback", lambda t: byte_ids(t, "a")),
        ("byte_fallback", lambda t: [*byte_ids(t, "a"), t.eos_token_id]),
        ("byte_fallback", lambda t: byte_ids(t, "é")[1:]),
    ],
)
def test_a_token_costs_the_same_however_much_is_held(kind: str, repeated: Callable[[Any], list[int]]) -> None:
    vocabulary = Counting(TOKENIZERS[kind].backend_tokenizer)
    detokenizer = Detokenizer(vocabulary)
    ids = repeated(TOKENIZERS[kind])
    for _ in range(1000 // len(ids)):
        for token_id in ids:
            detokenizer.push(token_id)
    detokenizer.flush()
    assert vocabulary.num_decoded < 20 * 1000


def num_lines(work: Callable[[], object]) -> int:
    """Lines of Python that some work takes."""
    counted = 0

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("written", ["a", "b", "ab"])
def test_a_long_stop_string_costs_no_more_a_token_than_a_short_one(written: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    vocabulary = Vocabulary(tokenizer.backend_tokenizer)
    ids = byte_ids(tokenizer, written * 400)

    def cost(stops: Sequence[str]) -> int:
        return num_lines(lambda: stream(Detokenizer(vocabulary, stops), ids))

    short = cost([f"a{last}" for last in "cdefghijklmnopqr"])
    assert cost(["a" * 1000 + last for last in "cdefghijklmnopqr"]) < 3 * short
    assert cost(["b" * 1000 + last for last in "cdefghijklmnopqr"]) < 3 * short
    assert cost(["ab" * 300 + last for last in "cdefghijklmnopqr"]) < 3 * short


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_a_token_begins_where_the_text_before_it_stays_as_it_is(kind: str, special: bool, seed: int) -> None:
    tokenizer, rng = TOKENIZERS[kind], random.Random(seed)
    vocabulary = Vocabulary(tokenizer.backend_tokenizer)
    eos = tokenizer.eos_token_id
    for parts in (1, 10):  # whole characters, or mostly parts of them
        ids = [*byte_ids(tokenizer, "né 你🙂x"), eos, len(tokenizer) + 5]
        ids += [rng.randrange(len(tokenizer)) for _ in range(20)] * parts
        ids = rng.choices(ids, k=300) + byte_ids(tokenizer, "né 你🙂x" * 9)
        places, before = Places(vocabulary, 7, special=special), ""
        for number, token_id in enumerate(ids, 1):
            place = places.next(token_id)
            text = tokenizer.backend_tokenizer.decode(ids[:number], skip_special_tokens=not special)
            common = len(os.path.commonprefix([before, text]))  # noqa: RUF071
            if text == before and text.endswith("\ufffd"):
                common -= 1  # one more part of a character that isn't whole, or what stands inside it
            assert place == 7 + common, (before, text)
            assert places.end == 7 + len(text)
            before = text


def test_places_cost_the_same_however_long_the_text() -> None:
    for kind, text in (("byte_level", "a"), ("byte_level", "é"), ("byte_fallback", "a")):
        vocabulary = Counting(TOKENIZERS[kind].backend_tokenizer)
        places = Places(vocabulary)
        for token_id in byte_ids(TOKENIZERS[kind], text) * 3000:
            places.next(token_id)
        assert vocabulary.num_decoded < 520 * 6000


def test_a_tokens_bytes_are_known_where_its_text_is_not() -> None:
    for tokenizer in TOKENIZERS.values():
        vocabulary = Vocabulary(tokenizer.backend_tokenizer)
        spelt = [vocabulary.bytes(token_id) for token_id in byte_ids(tokenizer, "né🙂")]
        assert [byte for one in spelt for byte in one or []] == list("né🙂".encode())
        assert vocabulary.word(tokenizer.eos_token_id) == tokenizer.eos_token
    spaced = TOKENIZERS["byte_fallback"]
    assert Vocabulary(spaced.backend_tokenizer).word(spaced.get_vocab()["\u2581the"]) == " the"
