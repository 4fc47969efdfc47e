"""A stream's chunks, of which the frame is written once: each says what the whole model of a chunk says."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from peftkit_serve.http.forms import ChatForm, TextForm
from peftkit_serve.http.pieces import Pieces
from peftkit_serve.http.schemas import ChatRequest, CompletionRequest
from peftkit_serve.request import RequestOutput, TokenLogprobs
from peftkit_serve.vocabulary import Vocabulary

ALPHABET = 'ab "\\/\n\r\t\x00\x1f\x7f\u2028\ufffdé漢🙂{}'


class Words(Vocabulary):
    """A vocabulary of words that stand alone."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.num_worded = 0

    def text(self, ids: list[int], *, special: bool = False) -> str:
        return "".join(self.words[id] for id in ids)

    def is_silent(self, id: int, *, special: bool = False) -> bool:
        return False

    def is_byte(self, id: int) -> bool:
        return False

    def word(self, id: int) -> str:
        self.num_worded += 1
        return self.words[id]

    def bytes(self, id: int) -> list[int] | None:
        return list(self.words[id].encode())


def forms(**fields: Any) -> list[Any]:
    """Both routes' forms of a request that is streamed."""
    text = CompletionRequest.model_validate({"model": "m", "prompt": ["p", "q"], "stream": True, **fields})
    scored = {"logprobs": True, "top_logprobs": fields.pop("logprobs")} if "logprobs" in fields else {}
    chat = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "p"}], "n": 2, "stream": True, **fields, **scored}
    )
    words = Words([f"t{number}" for number in range(100)])
    return [TextForm(text, [("p", [1]), ("q", [2])], words), ChatForm(chat, words)]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("unused", [None, {"usage"}])
def test_each_piece_is_the_whole_chunk(seed: int, fields: dict[str, Any], unused: set[str] | None) -> None:
    rng = random.Random(seed)
    head = {"id": "cmpl-1", "created": 7, "model": 'na"me'}
    for form, streamed in zip(forms(**fields), forms(**fields), strict=True):
        pieces = Pieces(streamed, head, unused)
        before: dict[int, RequestOutput] = {}
        texts = ["", ""]
        for step in range(40):
            index, last = rng.randrange(2), step >= 38
            if last:
                index = step - 38
            delta = "".join(rng.choices(ALPHABET, k=rng.randrange(4)))
            texts[index] += delta
            count = 1 + len(before[index].token_ids) if index in before else 1
            scores = tuple(TokenLogprobs(t, -0.5, ((t, -0.5),)) for t in range(count)) if fields else ()
            output = RequestOutput(
                str(index), texts[index], delta, tuple(range(count)), 3, "length" if last else None, logprobs=scores
            )
            piece = pieces.next(index, output)
            if piece is None:
                assert not delta and not last and index in before
                continue
            chunk = form.chunk(head, index, output, before.get(index))
            assert json.loads(piece) == json.loads(chunk.model_dump_json(exclude=unused)) and "\n" not in piece
            before[index] = output


@pytest.mark.parametrize("echo", [False, True])
def test_a_streams_tokens_are_worded_once_and_join_to_the_whole(seed: int, echo: bool) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 5))) for _ in range(40)]
    vocabulary = Words(words)
    prompts = [(vocabulary.text(ids), ids) for ids in ([1, 2, 3], [4, 5, 6])]
    fields: dict[str, Any] = {"model": "m", "prompt": ["p", "q"], "stream": True, "logprobs": 0, "echo": echo}
    form = TextForm(CompletionRequest.model_validate(fields), prompts, vocabulary)
    head = {"id": "cmpl-1", "created": 7, "model": "m"}
    prompt = tuple(TokenLogprobs(token, -1.0) for token in (2, 3))
    ids = [[rng.randrange(40) for _ in range(200)] for _ in range(2)]
    outputs = [
        [
            RequestOutput(str(index), "x" * n, "x", tuple(ids[index][:n]), 3, logprobs=scores, prompt_logprobs=prompt)
            for n in sorted({*rng.sample(range(1, 200), 50), 200})
            if (scores := tuple(TokenLogprobs(token, -float(i)) for i, token in enumerate(ids[index][:n])))
        ]
        for index in range(2)
    ]
    joined: list[dict[str, list[Any]]] = [{}, {}]
    before: list[RequestOutput | None] = [None, None]
    for both in itertools.zip_longest(*outputs):
        for index, output in enumerate(both):
            if output is not None:
                scored = form.chunk(head, index, output, before[index]).choices[0].logprobs
                assert scored is not None
                for name, values in scored.model_dump().items():
                    joined[index].setdefault(name, []).extend(values)
                before[index] = output
    assert vocabulary.num_worded == 2 * (200 + 3 * echo)
    whole = form.whole(head, [row[-1] for row in outputs])
    assert joined == [choice.logprobs.model_dump() for choice in whole.choices if choice.logprobs]
    text = "".join(joined[0]["tokens"])
    for token, offset in zip(joined[0]["tokens"], joined[0]["text_offset"], strict=True):
        assert text.startswith(token, offset)
