"""`peftkit serve` as people run it: the ready line, refusals before anything starts, and the drain."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from peftkit.cli.main import run
from peftkit.errors import RunError
from peftkit_serve.http import bind, create_app, serve, url_of


@contextmanager
def running(*options: object) -> Iterator[subprocess.Popen[str]]:
    """`peftkit serve` with these options as a process of its own."""
    command = [sys.executable, "-m", "peftkit.cli.main", "serve", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def refused(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str]:
    """Runs a command line that must end by itself: its exit code and what it said on stderr."""
    code = run(["serve", *map(str, options)])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_one_line_when_ready_and_a_drain_on_sigterm(
    base_folder: Path, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "blue").symlink_to(adapter_folders["blue"])
    (folder / "damaged").mkdir()
    (folder / "damaged" / "adapter_config.json").write_text("{")
    (folder / "no-adapter").mkdir()
    options = ["--base", base_folder, "--adapter", f"red={adapter_folders['red']}", "--adapters", folder, "--port", 0]
    with running(*options, "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline())
        url = ready["url"]
        assert ready["models"] == ["tiny", "blue", "red"]
        assert httpx.get(f"{url}/ready").status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            assert [card.id for card in client.models.list()] == ready["models"]
            stream = client.completions.create(
                model="red", prompt="a", max_tokens=800, stream=True, extra_body={"ignore_eos": True}
            )
            first = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            while (draining := httpx.get(f"{url}/ready")).status_code == 200:
                time.sleep(0.01)
            assert draining.json() == {"status": "draining"}
            assert [first, *stream][-1].choices[0].finish_reason == "length"
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0 and out == ""
    assert "leaked" not in err, "libraries find all of their objects freed at the end"
    said = err.splitlines()
    assert [line for line in said if "refused" in line] == [line for line in said if "damaged" in line] != []
    logged = [json.loads(line) for line in said if line.startswith("{")]
    assert [line["outcome"] for line in logged if "outcome" in line] == ["length"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_options_bound_what_a_step_holds(base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = ["--max-requests", 2, "--max-tokens-per-step", 16, "--max-adapters", 3, "--max-queue", 3]
    with running("--base", base_folder, "--port", 0, *bounds, "--json") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            answer = client.completions.create(
                model="tiny", prompt=["a" * 60, "b" * 60, "c" * 60], max_tokens=4, extra_body={"ignore_eos": True}
            )
            with pytest.raises(openai.BadRequestError, match="limit is 3 that wait"):
                client.completions.create(model="tiny", prompt=["a"] * 4)
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        figures = httpx.get(f"{url}/metrics").text
    assert 'max_lora="3"' in figures
    steps = float(re.findall(r"^peftkit_steps_total ([\d.e+]+)$", figures, re.M)[0])
    # 180 prompt tokens by 16 a step, less the first token that comes with a prompt's last piece
    assert steps >= 180 / 16
    code, said = refused(capsys, "--base", base_folder, "--max-requests", 0)
    assert code == 2 and "--max-requests" in said


def test_ctrl_c_ends_with_code_0_and_a_second_one_waits_for_nobody(base_folder: Path) -> None:
    with running("--base", base_folder, "--port", 0) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "tiny" in line and "http://127.0.0.1:" in line
        url = next(word for word in line.split() if word.startswith("http"))
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="stopped"):
                list(stream)
        assert process.wait(timeout=20) == 0


def test_a_drain_waits_for_who_reads_and_not_for_who_doesnt(base_folder: Path) -> None:
    # six bytes of the answer for each token of a prompt, which is computed once
    fields = {"model": "tiny", "prompt": ["\1" * 2040] * 256, "echo": True, "max_tokens": 1}
    with (
        running("--base", base_folder, "--port", 0, "--drain-timeout", 600, "--json") as process,
        ExitStack() as opened,
    ):
        assert process.stdout is not None
        host, port = json.loads(process.stdout.readline())["url"].removeprefix("http://").split(":")

        def ask(*, stream: bool) -> socket.socket:
            content = json.dumps({**fields, "stream": stream}).encode()
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.settimeout(200)
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Content-Length: " + str(len(content)).encode() + b"\r\n\r\n" + content
            )
            return connection

        reader, other = ask(stream=False), ask(stream=True)
        received, _ = reader.recv(1), other.recv(1)
        process.send_signal(signal.SIGTERM)
        while block := reader.recv(2**20):
            received += block
        assert received.endswith(b"}")
        assert len(received) > 3 * 10**6, "all of it would fit into the kernel's buffers"
        assert process.wait(timeout=200) == 0


def test_a_port_in_use_is_one_line_and_nothing_starts(
    base_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the engine was made")

    monkeypatch.setattr("peftkit_serve.EngineProcess.make", never)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said = refused(capsys, "--base", base_folder, "--port", port)
    assert code == 1 and said.count("\n") == 1 and f"port {port}" in said


def test_a_port_taken_while_the_model_loads_is_an_error_too(make_engine: Callable[..., Any]) -> None:
    from peftkit_serve import AsyncEngine

    with bind("127.0.0.1", 0, any_client=False) as listener:
        port = listener.getsockname()[1]
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            with pytest.raises(RunError, match=f"port {port}"):
                serve(create_app(AsyncEngine(make_engine()), served_name="tiny"), listener, lambda: None)


@pytest.mark.parametrize("spec", ["red", "=x", "red=", "a b=x", "x/y=z", "é=x"])
def test_an_adapter_option_that_is_none_is_refused(
    base_folder: Path, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    code, said = refused(capsys, "--base", base_folder, "--adapter", spec)
    assert code == 2 and said.count("\n") == 1 and f"--adapter {spec}" in said and "NAME=PATH" in said


def test_a_bad_adapter_ends_the_command_by_name_before_it_listens(
    base_folder: Path, adapter_folders: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    red = adapter_folders["red"]
    for options, name in (
        ([f"bad={tmp_path}"], "bad"),
        ([f"absent={tmp_path / 'absent'}"], "absent"),
        ([f"tiny={red}"], "tiny"),
        ([f"twice={red}", f"twice={red}"], "twice"),
    ):
        adapters = [word for option in options for word in ("--adapter", option)]
        code, said = refused(capsys, "--base", base_folder, "--port", 0, *adapters)
        assert code == 2 and said.count("\n") <= 2 and f"--adapter {name}=" in said and "Traceback" not in said


def test_a_folder_of_adapters_that_is_not_there_is_refused(
    base_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = refused(capsys, "--base", base_folder, "--adapters", tmp_path / "absent")
    assert code == 2 and "--adapters" in said and "no such folder" in said


def test_a_base_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = refused(capsys, "--base", tmp_path / "absent", "--port", 0)
    assert code == 2 and "absent" in said and said.count("\n") <= 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_no_auth(
    base_folder: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    code, said = refused(capsys, "--base", base_folder, "--host", host, "--port", 0)
    assert code == 2 and "--host" in said and "--no-auth" in said
    with bind("0.0.0.0", 0, any_client=True) as listener:
        assert url_of(listener).startswith("http://0.0.0.0:")


def test_a_host_that_is_none_is_refused(base_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = refused(capsys, "--base", base_folder, "--host", "no such host", "--port", 0)
    assert code == 2 and "--host no such host" in said


def test_localhost_and_ipv6_loopback_need_no_key() -> None:
    for host in ("localhost", "127.0.0.1", "::1"):
        try:
            listener = bind(host, 0, any_client=False)
        except RunError:
            pytest.skip("this machine has no IPv6")
        with listener:
            assert url_of(listener).startswith(("http://127.0.0.1:", "http://[::1]:"))
