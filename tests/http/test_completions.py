"""`/v1/completions` and `/v1/chat/completions` through the official client, unchanged."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
NAMES = ["tiny", "red", "blue", "soft"]
RANDOM: dict[str, Any] = {"temperature": 2, "extra_body": {"ignore_eos": True}}
"""Fields that make an answer long and unlike any other."""


@pytest.fixture
def async_client(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30)


def test_greedy_text_is_that_of_transformers(client: openai.OpenAI, base_folder: Path, seed: int) -> None:
    prompt = torch.randint(97, 123, (12,)).tolist()
    model = AutoModelForCausalLM.from_pretrained(base_folder)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 12:].tolist()
    expected = bytes(token for token in ids if token < 256).decode(errors="replace")
    for given in (prompt, bytes(prompt).decode()):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=24, temperature=0)
        assert answer.choices[0].text == expected


def test_completion_has_openai_fields_and_defaults(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="red", prompt="abc", extra_body={"ignore_eos": True})
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "red"
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].index == 0
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 16, 19)
    assert answer._request_id


def test_chat_completion_has_openai_fields(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    # <user>Hello<|end|><assistant>, one token a byte and one for <|end|>
    assert answer.usage.prompt_tokens == len("<user>Hello") + 1 + len("<assistant>")


def test_chat_without_limit_goes_on_to_the_end_of_the_context(client: openai.OpenAI, server: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * 1900}]
    answer = client.chat.completions.create(model="soft", messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == server.engine.room("soft") == 2048 - 20
    assert answer.choices[0].finish_reason == "length"


def test_max_tokens_beyond_the_context_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="x" * 2040, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_messages_in_parts_and_by_developer_are_the_same_prompt(client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    whole: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answers = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
        for messages in (parts, whole)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def test_an_answer_can_be_sent_back_as_the_client_returned_it(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="red", messages=HELLO, max_tokens=4)
    messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "again"}]
    assert client.chat.completions.create(model="red", messages=messages, max_tokens=2).choices
    dumped = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "again"}]
    assert client.chat.completions.create(model="red", messages=dumped, max_tokens=2).choices


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=2,
        user="u",
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        service_tier="auto",
        n=1,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        tools=[],
        logprobs=False,
        modalities=["text"],
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0},
    )
    assert answer.choices


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 1e-300},
        {"temperature": 1e-6},
        {"temperature": 2},
        {"top_p": 1e-300},
        {"min_p": 1},
        {"min_p": 1e-300},
        {"top_k": 2**31 - 1},
        {"top_k": 1},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"stop": ["x" * 1024, "é" * 1024]},
        {"max_tokens": 10**30},
    ],
    ids=str,
)
def test_values_at_the_ends_of_their_ranges_are_answered(client: openai.OpenAI, field: dict[str, Any]) -> None:
    body = {"max_tokens": 4, **field, "ignore_eos": True}
    prompt = "x" * 2000 if "max_tokens" in field else "abc"
    answer = client.completions.create(model="red", prompt=prompt, extra_body=body)
    assert answer.usage is not None and answer.usage.completion_tokens == (48 if "max_tokens" in field else 4)


def test_null_is_the_default_of_every_field_that_may_be_null(client: openai.OpenAI) -> None:
    names = ["temperature", "top_p", "top_k", "min_p", "stop", "stream", "n", "logit_bias", "logprobs", "ignore_eos"]
    fields: dict[str, Any] = {"model": "red", "prompt": "abc", "seed": 1}
    absent = client.completions.create(**fields)
    null = client.completions.create(**fields, extra_body={**dict.fromkeys(names), "max_tokens": None})
    assert null.choices == absent.choices


@pytest.mark.parametrize("model", NAMES)
def test_streamed_pieces_make_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(prompt="some text", **fields)
    chunks = list(
        client.completions.create(prompt="some text", stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("model", NAMES)
def test_streamed_chat_makes_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(stream=True, **fields))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_is_events_and_ends_with_done(server: Any) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert not any("usage" in event for event in events)


def test_the_async_client_and_its_streams(async_client: openai.AsyncOpenAI) -> None:
    async def ask() -> tuple[str, str]:
        fields: dict[str, Any] = {"model": "blue", "max_tokens": 12, "temperature": 0}
        async with async_client:
            whole = await async_client.completions.create(prompt="abc", **fields)
            stream = await async_client.completions.create(prompt="abc", stream=True, **fields)
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    whole, pieces = asyncio.run(ask())
    assert whole == pieces


def test_each_prompt_of_a_list_gets_a_choice(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "red", "max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}
    alone = [client.completions.create(prompt=prompt, **fields) for prompt in ("one", "three", "eleven")]
    texts = [answer.choices[0].text for answer in alone]
    together = client.completions.create(prompt=["one", "three", "eleven"], **fields)
    assert [(c.index, c.text) for c in together.choices] == list(enumerate(texts))
    assert together.usage is not None
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (14, 30)
    ids = client.completions.create(prompt=[list(b"one"), list(b"three")], **fields)
    assert [c.text for c in ids.choices] == texts[:2]
    pieces = ["", "", ""]
    for chunk in client.completions.create(prompt=["one", "three", "eleven"], stream=True, **fields):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "blue", "prompt": "abc", "max_tokens": 80, "seed": 5, **RANDOM}
    free = client.completions.create(**fields).choices[0].text
    stop = next(c for i, c in enumerate(free) if i >= 8 and c.isascii() and free.find(c) == i)
    for given in (stop, ["never there", stop]):
        if stream:
            chunks = list(client.completions.create(**fields, stop=given, stream=True))
            text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
        else:
            choice = client.completions.create(**fields, stop=given).choices[0]
            text, reason = choice.text, choice.finish_reason
        assert text == free[: free.find(stop)] and reason == "stop"


def test_a_seed_fixes_the_answer_and_none_draws_afresh(client: openai.OpenAI, seed: int) -> None:
    def ask(number: int | None) -> str:
        answer = client.completions.create(model="soft", prompt="abc", max_tokens=24, seed=number, **RANDOM)
        return answer.choices[0].text

    assert ask(seed) == ask(seed)
    assert ask(-seed - 1) == ask(-seed - 1)
    assert len({ask(None) for _ in range(4)}) > 1


def test_names_of_the_base_and_of_an_adapter(client: openai.OpenAI) -> None:
    def ask(model: str) -> str:
        answer = client.completions.create(model=model, prompt="abcdef", max_tokens=24, seed=1, **RANDOM)
        assert answer.model == model
        return answer.choices[0].text

    answers = {name: ask(name) for name in NAMES}
    assert ask("tiny:red") == answers["red"] and ask("tiny:soft") == answers["soft"]
    assert len(set(answers.values())) == 4


def test_adapters_in_one_batch_answer_as_alone(client: openai.OpenAI, async_client: openai.AsyncOpenAI) -> None:
    def fields(i: int) -> dict[str, Any]:
        return {"model": NAMES[i % 4], "prompt": f"prompt {i}", "max_tokens": 20 + i, "seed": i}

    async def ask_all() -> list[str]:
        async with async_client:
            answers = await asyncio.gather(*(async_client.completions.create(**fields(i)) for i in range(12)))
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask_all()) == [client.completions.create(**fields(i)).choices[0].text for i in range(12)]


def test_an_adapter_brings_its_own_chat_template(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="own", messages=HELLO, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens == len("[Hello]")
    other = client.chat.completions.create(model="red", messages=HELLO, max_tokens=1)
    assert other.usage is not None and other.usage.prompt_tokens != len("[Hello]")


def test_an_adapter_with_a_template_chats_over_a_base_without_one(
    base_without_template: Path,
    adapter_folders: dict[str, Path],
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
) -> None:
    engine = make_engine(base_without_template)
    engine.adapters.add("own", adapter_folders["own"])
    with serve(engine) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
        assert client.chat.completions.create(model="own", messages=HELLO, max_tokens=1).choices
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO)
        assert caught.value.param == "messages" and "/v1/completions" in caught.value.message
