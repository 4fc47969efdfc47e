"""A stream's chunks, of which the frame is written once: each says what the whole model of a chunk says."""

import json
import random
from typing import Any

import pytest

from peftkit_serve.http.forms import ChatForm, TextForm
from peftkit_serve.http.pieces import Pieces
from peftkit_serve.http.schemas import ChatRequest, CompletionRequest
from peftkit_serve.request import RequestOutput, TokenLogprobs

ALPHABET = 'ab "\\/\n\r\t\x00\x1f\x7f\u2028\ufffdé漢🙂{}'


def forms(**fields: Any) -> list[Any]:
    """Both routes' forms of a request that is streamed."""
    text = CompletionRequest.model_validate({"model": "m", "prompt": ["p", "q"], "stream": True, **fields})
    scored = {"logprobs": True, "top_logprobs": fields.pop("logprobs")} if "logprobs" in fields else {}
    chat = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "p"}], "n": 2, "stream": True, **fields, **scored}
    )
    return [TextForm(text, [("p", [1]), ("q", [2])], lambda token: f"t{token}"), ChatForm(chat, lambda t: f"t{t}")]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
@pytest.mark.parametrize("unused", [None, {"usage"}])
def test_each_piece_is_the_whole_chunk(seed: int, fields: dict[str, Any], unused: set[str] | None) -> None:
    rng = random.Random(seed)
    head = {"id": "cmpl-1", "created": 7, "model": 'na"me'}
    for form in forms(**fields):
        pieces = Pieces(form, head, unused)
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
