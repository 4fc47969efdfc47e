"""The service over an engine in a process of its own: what clients, administrators and supervisors see of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from peftkit_serve import Engine, EngineProcess

LONG: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 2000, "ignore_eos": True}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def engine_process(base: Path) -> EngineProcess:
    engine = EngineProcess()
    engine.make(partial(Engine, base, device="cpu", deterministic=True, max_requests=8, max_adapters=4, num_pages=512))
    return engine


@pytest.fixture(scope="module")
def served(base_folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(engine_process(base_folder)) as served:
        yield served


def is_idle(served: Any) -> bool:
    stats = served.engine.stats()
    return not stats["requests_running"] and not stats["requests_waiting"] and not stats["pages_used"]


def test_answers_are_those_of_an_engine_in_the_servers_own_process(served: Any, server: Any, seed: int) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = {"messages": [{"role": "user", "content": "é\U0001f600"}], "max_tokens": 40}
    for route, body in (
        ("completions", {"prompt": ["a", "bc"], "max_tokens": 30, "logprobs": 2, "n": 2, "seed": seed % 1000}),
        ("completions", {"prompt": "x" * 1900, "max_tokens": 5, "echo": True, "temperature": 0}),
        ("chat/completions", {**message, "seed": 1, "logprobs": True, "top_logprobs": 3}),
        ("chat/completions", {**message, "seed": 2, "response_format": form}),
        ("completions", {"prompt": "x", "max_tokens": 0}),
        ("completions", {"prompt": "y" * 500_000, "max_tokens": 5}),
        ("chat/completions", {**message, "response_format": {**form, "json_schema": {"schema": {"type": "no"}}}}),
    ):
        one, other = (
            httpx.post(f"{url}/v1/{route}", json={"model": "tiny", **body}) for url in (served.url, server.url)
        )
        assert one.status_code == other.status_code
        left, right = ({k: v for k, v in said.json().items() if k not in ("id", "created")} for said in (one, other))
        assert left == right
    assert is_idle(served)


def test_a_stream_is_whole_and_a_client_that_goes_away_frees_its_request(served: Any) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "tiny", "prompt": "q", "max_tokens": 300, "seed": 5}
        whole = client.completions.create(**fields, extra_body={"ignore_eos": True}).choices[0].text
        stream = client.completions.create(**fields, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in stream) == whole
    before = served.engine.stats()["generated_tokens"]
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_for(lambda: served.engine.stats()["requests_running"] == 1)
    wait_for(lambda: is_idle(served))
    assert served.engine.stats()["generated_tokens"] - before < 2000


def test_adapters_come_are_used_and_go_while_others_answer(served: Any, adapter_folders: dict[str, Path]) -> None:
    with httpx.Client(base_url=served.url, timeout=30) as http:

        def upload(folder: Path) -> dict[str, Any]:
            files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
            answer = http.post("/v1/adapters", data={"name": "mine"}, files=files)
            assert answer.status_code == 201, answer.text
            return answer.json()

        def text(model: str) -> str:
            body = {"model": model, "prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            return http.post("/v1/completions", json=body).json()["choices"][0]["text"]

        base = text("tiny")
        with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}) as other:
            lines = other.iter_lines()
            next(lines)
            first = upload(adapter_folders["red"])
            assert first["tier"] == "host"
            red = text("mine")
            assert red != base
            wait_for(lambda: http.get("/v1/adapters/mine").json()["versions"][0]["tier"] == "gpu")
            upload(adapter_folders["blue"])
            assert text("mine") not in (base, red) and text("mine@1") == red
            half = http.post("/v1/adapters/mine/aliases", json={"weights": {"1": 1, "2": 1}}).json()
            assert [one["weight"] for one in half["versions"]] == [0.5, 0.5]
            assert "peftkit_adapters 2.0" in http.get("/metrics").text
            removed = http.delete("/v1/adapters/mine").json()
            assert removed["freed_bytes"] > 0
            assert http.post("/v1/completions", json={"model": "mine", "prompt": "a"}).status_code == 404
            next(lines)
        wait_for(lambda: is_idle(served))
        assert served.engine.adapters.names() == [] and text("tiny") == base


def test_time_limits_hold_and_a_killed_engine_is_every_clients_error(
    base_folder: Path, serve: Callable[..., Any]
) -> None:
    with serve(engine_process(base_folder), request_timeout_s=0.3) as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=LONG)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
        wait_for(lambda: is_idle(served))
        assert httpx.get(f"{served.url}/health").status_code == httpx.get(f"{served.url}/ready").status_code == 200
        with httpx.stream("POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(served.engine.pid, signal.SIGKILL)
            *_, error, done = [line for line in lines if line]
        assert done == "data: [DONE]" and json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
        assert httpx.get(f"{served.url}/health").status_code == httpx.get(f"{served.url}/ready").status_code == 503
        assert httpx.post(f"{served.url}/v1/completions", json=LONG).status_code == 503
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_object"},
        }
        assert httpx.post(f"{served.url}/v1/chat/completions", json=body).status_code == 503


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextmanager
def command(base: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """`peftkit serve` in a process group of its own, its address, and its engine's process."""
    line = [sys.executable, "-m", "peftkit.cli.main", "serve", "--base", str(base), "--port", "0", "--json"]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            (engine,) = children_of(process.pid)
            yield process, url, engine
        finally:
            process.kill()


def test_ctrl_c_in_a_terminal_reaches_both_processes_and_drains(base_folder: Path) -> None:
    with command(base_folder) as (process, url, engine):
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "max_tokens": 500, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.killpg(process.pid, signal.SIGINT)
            *_, last, done = [line for line in lines if line]
        assert done == "data: [DONE]" and '"finish_reason":"length"' in last
        assert process.wait(20) == 0 and not is_there(engine)
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert [json.loads(line)["outcome"] for line in lines if line.startswith("{")] == ["length"]


def test_a_server_whose_engine_is_killed_ends_with_an_error(base_folder: Path) -> None:
    echo = {"model": "tiny", "prompt": ["\1" * 2040] * 256, "echo": True, "max_tokens": 1}  # 3 MB, computed once
    with command(base_folder) as (process, url, engine), socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        content = json.dumps(echo).encode()
        unread.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: " + str(len(content)).encode() + b"\r\n\r\n" + content
        )
        unread.recv(1)  # and no more: it isn't waited for
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            assert any("engine_error" in line for line in lines)
        assert process.wait(20) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert "code -9" in said and "Traceback" not in said
