"""A client that goes away is not worked for: its pages, its slot and its adapter's reference are back within a step."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

from peftkit_serve.http.sse import EventStream, merge, while_connected

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def send(server: Any, body: dict[str, Any]) -> socket.socket:
    """Sends a completions request and returns its connection, the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        + str(len(content)).encode() + b"\r\n\r\n" + content
    )  # fmt: skip
    return connection


@pytest.mark.parametrize("model", ["tiny", "red", "soft"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: Any, model: str, stream: bool) -> None:
    generated = server.engine.stats()["generated_tokens"]
    with send(server, {**LONG, "model": model, "stream": stream}):
        wait_for(lambda: server.engine.stats()["generated_tokens"] > generated)
        assert server.engine.stats()["requests_running"] == 1
        if model != "tiny":
            assert server.engine.adapters.get(model).references == 1
    wait_for(lambda: not server.engine.has_work())
    assert server.engine.stats()["generated_tokens"] - generated < LONG["max_tokens"], "the request ran to its end"


def test_all_prompts_of_a_request_that_is_gone_end(server: Any) -> None:
    with send(server, {**LONG, "model": "red", "prompt": ["a", "b", "c"] * 5}):  # 8 run, 7 wait
        wait_for(lambda: server.engine.stats()["requests_waiting"] == 7)
    wait_for(lambda: not server.engine.has_work())
    server.wait_idle()


def test_a_stream_that_is_closed_early_frees_its_request(client: openai.OpenAI, server: Any) -> None:
    stream = client.completions.create(model="blue", stream=True, prompt="abc", max_tokens=2000)
    with stream:
        next(iter(stream))
    wait_for(lambda: not server.engine.has_work())


def test_others_answer_on_while_clients_go_away(client: openai.OpenAI, server: Any) -> None:
    fields: dict[str, Any] = {"model": "red", "prompt": "abcd", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    alone = client.completions.create(**fields, seed=3).choices[0].text
    connections = [send(server, {**LONG, "model": model, "stream": True}) for model in ("red", "soft", "tiny")]
    wait_for(lambda: server.engine.stats()["requests_running"] == 3)
    stream = client.completions.create(**fields, seed=3, stream=True)
    text = next(iter(stream)).choices[0].text
    for connection in connections:
        connection.close()
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone
    wait_for(lambda: not server.engine.has_work())


def test_a_cancelled_request_is_counted_and_logged_as_one(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    def cancelled() -> int:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        name = 'peftkit_requests_total{adapter="soft",outcome="cancelled",tenant=""}'
        return next((int(float(line.split()[-1])) for line in lines if line.startswith(name)), 0)

    before = cancelled()
    with caplog.at_level(logging.INFO, "peftkit_serve.http"):
        with send(server, {**LONG, "model": "soft", "stream": True}):
            wait_for(lambda: server.engine.has_work())
        wait_for(lambda: cancelled() == before + 1)
        wait_for(lambda: any("'outcome': 'cancelled'" in record.message for record in caplog.records))


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_a_client_that_goes_away_within_its_body_is_no_fault_of_ours(
    server: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def line() -> dict[str, Any] | None:
        said = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
        return next((one for one in said if one.get("path") == "/v1/adapters"), None)

    host, port = server.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.INFO, "peftkit_serve.http"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = f"POST /v1/adapters HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\nContent-Type: {kind}"
            connection.sendall(head.encode() + b"\r\n\r\n--x\r\n")
            time.sleep(0.05)  # so that it is waited for
        wait_for(lambda: line() is not None)
    assert (line() or {})["status"] == 499
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_work_is_cancelled_when_the_client_goes_away() -> None:
    messages = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    ended = asyncio.Event()

    async def receive() -> Any:
        await asyncio.sleep(0)
        return messages.pop(0)

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(ClientDisconnect):
        await while_connected(work(), receive)
    assert ended.is_set()


async def test_work_that_ends_or_fails_is_seen_and_nothing_listens_on() -> None:
    listening = 0

    async def receive() -> Any:
        nonlocal listening
        listening += 1
        try:
            await asyncio.sleep(60)
        finally:
            listening -= 1

    async def good() -> int:
        await asyncio.sleep(0.01)
        return 5

    async def bad() -> int:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    assert await while_connected(good(), receive) == 5
    with pytest.raises(ValueError, match="no"):
        await while_connected(bad(), receive)
    assert listening == 0


async def test_the_first_failure_of_merged_streams_ends_all() -> None:
    ended: list[str] = []

    async def stream(name: str, fails: bool) -> AsyncGenerator[str, None]:
        try:
            for _ in range(3):
                await asyncio.sleep(0.001)
                yield name
            if fails:
                raise ValueError(name)
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    seen: list[tuple[int, str]] = []
    with pytest.raises(ValueError, match="b"):
        async for item in merge([stream("a", False), stream("b", True)]):
            seen.append(item)
    assert sorted(ended) == ["a", "b"]
    assert seen.count((0, "a")) == seen.count((1, "b")) == 3


@pytest.mark.parametrize("num_streams", [1, 2, 50])
async def test_merged_streams_are_asked_for_no_more_than_is_taken(num_streams: int) -> None:
    made, num_taken = [0] * num_streams, 20 * num_streams

    async def stream(index: int) -> AsyncGenerator[int, None]:
        while True:
            made[index] += 1
            yield made[index]

    taken: list[list[int]] = [[] for _ in made]
    async with aclosing(merge([stream(index) for index in range(num_streams)])) as merged:
        async for index, item in merged:
            taken[index].append(item)
            for _ in range(5):  # the reader is slow, the streams never wait
                await asyncio.sleep(0)
            assert made[index] <= len(taken[index]) + 2
            if sum(map(len, taken)) == num_taken:
                break
    assert sum(made) <= num_taken + num_streams + 1
    assert all(items == list(range(1, len(items) + 1)) and items for items in taken)
    assert max(map(len, taken)) - min(map(len, taken)) <= 2, "a stream waits while another goes on"


async def test_a_stream_that_never_waits_ends_with_its_client_and_others_have_their_turn() -> None:
    ended = asyncio.Event()
    turns = num_sent = 0

    async def events() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: x\n\n"
        finally:
            ended.set()

    async def send(_: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        assert num_sent < 10_000, "nothing else has had a turn"

    async def receive() -> Any:
        nonlocal turns
        while turns < 100:
            turns += 1
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    await EventStream(events())({"type": "http"}, receive, send)
    assert ended.is_set() and num_sent <= 110
