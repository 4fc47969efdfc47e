"""What is refused, with the field named, in OpenAI's error body; nothing a client sends gives 500."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import TypeAdapter, ValidationError

from peftkit_serve.http.schemas import ChatRequest, TokenIds

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 2}


def refused(server: Any, path: str, body: object, **options: Any) -> dict[str, Any]:
    """Posts a body that must be answered with 400; returns the error."""
    answer = httpx.post(f"{server.url}/v1/{path}", content=json.dumps(body), headers=_JSON, **options)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["message"] and error["code"] and len(answer.text) < 1000, "what was sent is not quoted at length"
    return error


_JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "end"),
    ],
)
def test_a_text_field_that_would_change_the_answer_is_refused_by_name(server: Any, field: str, value: object) -> None:
    error = refused(server, "completions", {**TEXT, field: value})
    assert error["param"] == field and error["code"] == "unsupported_parameter" and field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a", "format": "wav"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
    ],
)
def test_a_chat_field_that_would_change_the_answer_is_refused_by_name(server: Any, field: str, value: object) -> None:
    error = refused(server, "chat/completions", {**CHAT, field: value})
    assert error["param"] == field and error["code"] == "unsupported_parameter" and field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", 2),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 1000] * 1000),
        ("stop", "x" * 1025),
        ("stop", ["a", "x" * 5_000_000]),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("stream_options", {"include_usage": True}),
        ("user", 7),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {str(token): 0 for token in range(1025)}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", [5]),
        ("logprobs", 21),
        ("priority", 10**6),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused_by_name(server: Any, field: str, value: object) -> None:
    for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
        error = refused(server, path, {**body, field: value})
        assert error["param"].partition(".")[0] == field and field in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": ["a"] * 100, "n": 3}, "n"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": 2}, "logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
            "response_format",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
        ),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_fields_that_dont_go_together_are_refused_by_name(server: Any, path: str, fields: Any, param: str) -> None:
    body = TEXT if path == "completions" else CHAT
    assert refused(server, path, {**body, **fields})["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        ["a", ""],
        [5, 260],
        [-1],
        [2**31],
        [2**70],
        [5, "a"],
        None,
        {"text": "a"},
        "\ud800",
        ["ok", "\ud800"],
    ],
)
def test_a_prompt_that_is_none_is_refused(server: Any, prompt: object) -> None:
    for echo in (False, True):
        assert refused(server, "completions", {**TEXT, "prompt": prompt, "echo": echo})["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "robot", "content": "a"}], "messages[1].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "a", "tool_call_id": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "a", "contents": "b"}], "messages[0].contents"),
        ([{"role": "assistant", "content": "the template wants the user first"}], "messages"),
    ],
)
def test_messages_that_are_none_are_refused_with_their_place(server: Any, messages: object, param: str) -> None:
    assert refused(server, "chat/completions", {**CHAT, "messages": messages})["param"] == param


def test_a_template_that_fails_is_the_requests_fault_not_the_servers(server: Any) -> None:
    error = refused(server, "chat/completions", {**CHAT, "model": "broken"})
    assert error["param"] == "messages" and "template" in error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_unknown_field_is_refused_with_the_nearest_name(server: Any, path: str) -> None:
    body = {**(TEXT if path == "completions" else CHAT), "temprature": 1}
    error = refused(server, path, body)
    assert error["param"] == "temprature" and error["code"] == "unknown_parameter"
    assert "did you mean 'temperature'?" in error["message"]
    nested = refused(server, path, {**body, "temprature": 1, "stream": True, "stream_options": {"usage": True}})
    assert nested["param"] in ("temprature", "stream_options.usage")


def test_limits_that_differ_are_refused(server: Any) -> None:
    assert refused(server, "completions", {**TEXT, "max_completion_tokens": 3})["param"] == "max_completion_tokens"
    assert httpx.post(f"{server.url}/v1/completions", json={**TEXT, "max_completion_tokens": 2}).status_code == 200


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(server: Any, field: str) -> None:
    error = refused(server, "completions", {k: v for k, v in TEXT.items() if k != field})
    assert error["param"] == field and error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("length", [2048, 2049, 5000])
def test_a_prompt_longer_than_the_context_is_refused(server: Any, length: int) -> None:
    error = refused(server, "completions", {**TEXT, "prompt": "x" * length})
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt" and "2047" in error["message"]
    error = refused(server, "chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * length}]})
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


def test_a_text_that_cant_fit_is_refused_before_it_is_tokenised(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenised(*_: Any) -> list[int]:
        raise AssertionError

    monkeypatch.setattr("peftkit_serve.http.service.encode_prompt", tokenised)
    monkeypatch.setattr("peftkit_serve.http.service.encode_rendered", tokenised)
    text = "x" * 2**20
    for path, body, field in (
        ("completions", {**TEXT, "prompt": text}, "prompt"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = refused(server, path, body)
        assert error["code"] == "context_length_exceeded" and error["param"] == field
        assert "2048 tokens" in error["message"] and "characters" in error["message"]


def test_virtual_tokens_count_against_the_context(server: Any) -> None:
    error = refused(server, "completions", {**TEXT, "model": "soft", "prompt": "x" * 2028})
    assert error["code"] == "context_length_exceeded"
    body = {**TEXT, "model": "soft", "prompt": "x" * 2027}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("model", ["rad", "tiny:rad", "tiny:", "tiny:tiny", "", "other:red", "red:tiny", "x" * 5000])
def test_an_unknown_model_is_404(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model=model, prompt="abc")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert len(caught.value.message) < 400


def test_a_misspelt_model_is_told_the_nearest_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'blue'"):
        client.completions.create(model="bleu", prompt="abc")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b'{"model": "tiny", "prompt": "\xff"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 6000 + b"}",
        b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
        b'{"model": "tiny\\ud800", "prompt": "a"}',
        b'{"model": "tiny", "prompt": "a", "stop": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "' + b"k" * 10_000 + b'": 1}',
    ],
    ids=range(15),
)
def test_a_body_that_is_no_request_is_refused_and_not_quoted_at_length(server: Any, content: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=_JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] and len(answer.text) < 1000


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', "prompt"),
        (b'{"model": "tiny", "model": "red", "prompt": "b"}', "model"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "5"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(server: Any, content: bytes, param: str) -> None:
    error = httpx.post(f"{server.url}/v1/completions", content=content, headers=_JSON).json()["error"]
    assert error["param"] == param and error["code"] == "duplicate_parameter"


HALF = "\ud800"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"description": HALF}}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": HALF}}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": f"a{HALF}b"}, "prompt"),
        ("completions", {"prompt": ["a", HALF]}, "prompt"),
        ("completions", {"suffix": HALF}, "suffix"),
        ("completions", {"model": f"tiny:{HALF}"}, "model"),
        ("completions", {"user": HALF}, "user"),
        ("completions", {HALF: 1}, "\\ud800"),
        ("chat/completions", {"stop": HALF}, "stop"),
        ("chat/completions", {"stop": ["a", HALF]}, "stop"),
        ("chat/completions", {"user": HALF}, "user"),
        ("chat/completions", {"metadata": {"a": HALF}}, "metadata.a"),
        ("chat/completions", {"metadata": {HALF: "a"}}, "metadata"),
        ("chat/completions", {"tools": [TOOL]}, "tools[0].function.parameters.properties.x.description"),
        ("chat/completions", {"response_format": SCHEMA}, "response_format.json_schema.schema.title"),
        ("chat/completions", {"messages": [{"role": HALF, "content": "a"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [*HELLO, {"role": "user", "content": HALF}]}, "messages[1].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
            "messages[0].content[0].text",
        ),
        ("adapters", {"name": HALF, "path": "x"}, "name"),
        ("tenants", {"name": "t", "adapters": [HALF]}, "adapters"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(
    server: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"completions": TEXT, "chat/completions": CHAT}.get(path, {}) | fields
    error = refused(server, path, body)
    assert error["param"] == param and "surrogate" in error["message"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (TokenIds, ["a"] * 1000),
        (ChatRequest, {**CHAT, "messages": [1] * 1000}),
        (ChatRequest, {**CHAT, "messages": [{"role": "user", "content": "a", "tool_calls": [1] * 1000}]}),
        (ChatRequest, {**CHAT, "tools": [1] * 1000}),
        (ChatRequest, {**CHAT, "metadata": {str(number): number for number in range(1025)}}),
        (ChatRequest, {**CHAT, "logit_bias": {str(number): "x" for number in range(1025)}}),
    ],
)
def test_long_lists_and_objects_are_not_checked_to_their_ends(kind: Any, value: Any) -> None:
    with pytest.raises(ValidationError) as wrong:
        TypeAdapter(kind).validate_python(value)
    assert wrong.value.error_count() == 1


def test_whole_surrogate_pairs_are_characters_and_a_body_may_begin_with_a_byte_order_mark(server: Any) -> None:
    body = json.dumps({**TEXT, "prompt": "🙂", "user": "🙂"})
    assert "\\ud83d" in body
    for mark in (b"", b"\xef\xbb\xbf"):
        answer = httpx.post(f"{server.url}/v1/completions", content=mark + body.encode(), headers=_JSON)
        assert answer.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("content", [b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', json.dumps(TEXT).encode("utf-16")])
def test_a_body_that_is_not_utf_8_is_refused(server: Any, content: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=_JSON)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_a_body_without_a_json_content_type_is_refused_with_the_remedy(server: Any) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=json.dumps(TEXT))
    assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]


def test_a_body_over_the_limit_is_413_declared_or_not(server: Any) -> None:
    large = json.dumps({**TEXT, "prompt": "x" * 9_000_000}).encode()
    with httpx.Client() as client:
        declared = client.post(f"{server.url}/v1/completions", content=large, headers=_JSON)
        chunked = client.post(
            f"{server.url}/v1/completions",
            content=(large[i : i + 65536] for i in range(0, len(large), 65536)),
            headers=_JSON,
        )
        for answer in (declared, chunked):
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
        assert client.post(f"{server.url}/v1/completions", json=TEXT).status_code == 200


def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_sent(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_arrive_is_408_and_a_stream_outlives_that_time(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    with serve(make_engine(), body_timeout_s=0.3) as slow:
        host, port = slow.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b'Content-Length: 100\r\n\r\n{"model"'
            )
            answer = b""
            while block := connection.recv(65536):  # the server closes it
                answer += block
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        begin = time.monotonic()
        assert httpx.post(f"{slow.url}/v1/completions", json=body, timeout=30).text.endswith("data: [DONE]\n\n")
        assert time.monotonic() - begin > 0.3
        slow.wait_idle()


def test_unknown_routes_and_methods_have_the_same_body(server: Any) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
