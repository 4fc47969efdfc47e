"""n, log-probabilities, echo, constrained answers, tools and biases, through the official client."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import torch
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def test_n_answers_are_those_of_the_seeds_that_follow(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "red", "max_tokens": 12, "temperature": 2, **LONG}
    alone = [client.completions.create(prompt="abc", seed=7 + i, **fields).choices[0].text for i in range(3)]
    together = client.completions.create(prompt=["abc", "xyz"], seed=7, n=3, best_of=3, **fields)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices[:3]] == alone and len(set(alone)) == 3
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (6, 72)
    chat = client.chat.completions.create(model="red", messages=HELLO, n=2, seed=1, max_tokens=12, temperature=2)
    assert len({choice.message.content for choice in chat.choices}) == 2
    pieces = ["", ""]
    for chunk in client.chat.completions.create(
        model="red", messages=HELLO, n=2, seed=1, max_tokens=12, temperature=2, stream=True
    ):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == [choice.message.content for choice in chat.choices]


def expected_logprobs(base_folder: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(base_folder)(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True])
def test_text_logprobs_with_echo_are_those_of_transformers(
    client: openai.OpenAI, base_folder: Path, stream: bool
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "some text", "max_tokens": 5, "temperature": 0, **LONG}
    fields |= {"echo": True, "logprobs": 2, "logit_bias": {str(token): 50 for token in b"q"}}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
        text = "".join(chunk.text for chunk in chunks)
        logprobs = [chunk.logprobs for chunk in chunks]
    else:
        choice = client.completions.create(**fields).choices[0]
        text, logprobs = choice.text, [choice.logprobs]
    assert text == "some text" + "q" * 5
    tokens = [token for one in logprobs for token in one.tokens]
    values = [value for one in logprobs for value in one.token_logprobs]
    offsets = [offset for one in logprobs for offset in one.text_offset]
    tops = [top for one in logprobs for top in one.top_logprobs]
    assert tokens == list(text) and offsets == list(range(14))
    expected = expected_logprobs(base_folder, list(text.encode()))
    assert values[0] is None and tops[0] is None
    assert values[1:] == pytest.approx([float(expected[i, text.encode()[i + 1]]) for i in range(13)], abs=1e-4)
    for i, top in enumerate(tops[1:]):
        assert max(top.values()) == pytest.approx(float(expected[i].max()), abs=1e-4) and len(top) <= 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["né <|end|>🙂 x", [*"né ".encode(), 256, *"🙂 x".encode()]], ids=["text", "ids"])
def test_text_offsets_are_where_tokens_begin_in_the_text(client: openai.OpenAI, stream: bool, prompt: Any) -> None:
    fields: dict[str, Any] = {
        "model": "red",
        "prompt": [prompt, prompt[1:2] if isinstance(prompt, str) else [*"é".encode()]],
        "echo": True,
        "logprobs": 0,
        "n": 2,
        "seed": 5,
    }
    fields |= {"max_tokens": 120, "temperature": 2, "logit_bias": {str(byte): 2 for byte in "é🙂a".encode()}, **LONG}
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]  # type: ignore[var-annotated]
    answers = client.completions.create(**fields, stream=True) if stream else [client.completions.create(**fields)]
    for choice in (choice for answer in answers for choice in answer.choices):
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
    assert offsets[0][:9] == [0, 1, 1, 2, 3, 10, 10, 10, 10] and texts[0].startswith("né <|end|>🙂 x")
    for text, words, places in zip(texts, tokens, offsets, strict=True):
        assert len(words) == len(places) > 120 and places == sorted(places)
        begin = 12 if len(words) > 125 else 1  # behind the prompt a special token is no text
        for word, place in zip(words, places, strict=True):
            if "\ufffd" not in word and not (word == "<|end|>" and place >= begin):
                assert text.startswith(word, place)


def test_echo_without_answer_scores_the_prompt_alone(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "blue", "prompt": "score me", "echo": True, "logprobs": 0}
    scored = client.completions.create(**fields, max_tokens=0)
    longer = client.completions.create(**fields, max_tokens=3, extra_body={"ignore_eos": True})
    choice = scored.choices[0]
    assert choice.text == "score me" and choice.finish_reason == "length" and choice.logprobs is not None
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    assert longer.choices[0].logprobs is not None
    assert choice.logprobs.token_logprobs == longer.choices[0].logprobs.token_logprobs[:8]  # type: ignore[index]
    pieces = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, max_tokens=0, stream=True))
    assert pieces == "score me"
    ids = client.completions.create(**fields | {"prompt": list(b"score me")}, max_tokens=0)
    assert ids.choices[0].text == "score me"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_tokens_bytes_and_alternatives(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "red", "messages": HELLO, "max_tokens": 30, "temperature": 2, **LONG}
    fields |= {"logprobs": True, "top_logprobs": 3, "seed": 3}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
        content = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content or []]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.logprobs is not None
        content, text = choice.logprobs.content or [], choice.message.content
    assert len(content) == 30
    written = [bytes(one.bytes or []) for one in content if one.token != "<|end|>"]
    assert b"".join(written).decode(errors="replace") == text
    for one in content:
        assert one.logprob <= 0 and len(one.top_logprobs) == 3
        assert bytes(one.bytes or []).decode(errors="replace") == one.token
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)


class Answer(BaseModel):
    """What the client asks for by its own helper."""

    name: str = Field(max_length=6)
    sure: bool
    score: int = Field(ge=0, le=9)


@pytest.mark.parametrize("model", ["tiny", "red", "soft"])
def test_an_answer_by_schema_is_parsed_by_the_clients_own_helper(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=HELLO, response_format=Answer, max_tokens=100, temperature=1.5, seed=5
    )
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.parsed is not None
    assert 0 <= answer.choices[0].message.parsed.score <= 9


def test_a_streamed_answer_by_schema_is_valid_and_an_object_is_an_object(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2, "three"]}}, "required": ["a"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    fields: dict[str, Any] = {"model": "red", "messages": HELLO, "max_tokens": 60, "temperature": 2}
    stream = client.chat.completions.create(**fields, response_format=form, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert jsonschema_rs.is_valid(schema, json.loads(text)), text
    anything: Any = {"type": "json_object"}
    whole = client.chat.completions.create(**fields, response_format=anything).choices[0]
    assert (whole.message.content or "").startswith("{")


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[tool {{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_calls_and_results_reach_the_adapters_own_template(
    make_engine: Callable[..., Any], serve: Callable[..., Any], write_lora: Callable[..., Path], tmp_path: Path
) -> None:
    engine = make_engine()
    engine.adapters.add("tools", write_lora(tmp_path / "tools", 9, chat_template={"text": TOOL_TEMPLATE, "sha256": ""}))
    tools: Any = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    call: Any = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": "S"},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    with serve(engine) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:

        def num_prompt_tokens(**fields: Any) -> int:
            answer = client.chat.completions.create(model="tools", messages=messages, max_tokens=1, **fields)
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        # one token a byte, and one for each <|end|>
        text = '<system>S<user>Hello<assistant>[call sum {"a": 1}]<tool>3<assistant>'
        assert num_prompt_tokens() == num_prompt_tokens(tools=tools, tool_choice="none") == len(text) + 4
        assert num_prompt_tokens(tools=tools) == len("[tool sum]") + len(text) + 4
        call["function"]["arguments"] = '{"a": "\\ud800"}'  # JSON in JSON
        with pytest.raises(openai.BadRequestError, match="surrogate") as caught:
            num_prompt_tokens()
        assert caught.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stop_string_holds_back_comes_at_the_end_with_its_tokens(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "blue", "messages": HELLO, "max_tokens": 40, "temperature": 2, "n": 2, "seed": 9}
    fields |= {"logprobs": True, "top_logprobs": 0, "logit_bias": {str(token): 100 for token in b"abcdef"}, **LONG}

    def ask(stop: list[str] | None) -> list[tuple[str, str, int]]:
        """Of each answer: text, why it ended, and its tokens."""
        texts, reasons, tokens = ["", ""], ["", ""], [0, 0]
        if stream:
            for chunk in client.chat.completions.create(**fields, stop=stop, stream=True):
                choice = chunk.choices[0]
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or ""
                tokens[choice.index] += len(choice.logprobs.content or []) if choice.logprobs else 0
        else:
            for choice in client.chat.completions.create(**fields, stop=stop).choices:
                texts[choice.index], reasons[choice.index] = choice.message.content or "", choice.finish_reason
                tokens[choice.index] = len(choice.logprobs.content or []) if choice.logprobs else 0
        return list(zip(texts, reasons, tokens, strict=True))

    free = ask(None)
    assert [len(text) for text, _, _ in free] == [40, 40]
    # each is begun where an answer ends, and never complete
    assert ask([text[-length:] + "!" for text, _, _ in free for length in (1, 17, 40)]) == free
    stop = free[0][0][20:28]
    cut = ask([free[0][0][12:28] + "!", stop])
    assert cut[0] == (free[0][0][: free[0][0].find(stop)], "stop", free[0][0].find(stop) + len(stop))
    assert cut[1] == (free[1] if stop not in free[1][0] else cut[1])


def test_penalties_and_repetition_change_the_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 30, "temperature": 0}
    bias = {"113": 30}
    loop = client.completions.create(**fields, logit_bias=bias, **LONG).choices[0].text
    assert loop == "q" * 30
    for penalty in ({"frequency_penalty": 2}, {"repetition_penalty": 9.0, "frequency_penalty": 2.0}):
        body = {**penalty, "ignore_eos": True}
        assert client.completions.create(**fields, logit_bias=bias, extra_body=body).choices[0].text != loop


def test_curl_streams_as_the_manual_says(server: Any) -> None:
    body = json.dumps({"model": "red", "prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert said.startswith("data: {") and said.endswith("data: [DONE]\n\n")
