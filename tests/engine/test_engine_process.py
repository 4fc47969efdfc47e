"""The life of an engine's process: how it begins, what a fault of it does to its clients, and that it never outlives
its server."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peftkit.errors import BaseModelError, PeftkitError, RunError
from peftkit_serve import Engine, EngineProcess, Request, RequestOutput, SamplingParams, engine_process


class Code:
    """An expression that is evaluated where it is unpickled: what the process is told to make."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __call__(self) -> Engine:
        raise AssertionError("made in this process")

    def __reduce__(self) -> Any:
        return eval, (self.source,)


def ask(max_tokens: int, request_id: str) -> Request:
    return Request([1, 2], None, SamplingParams(max_tokens=max_tokens, ignore_eos=True), request_id)


async def outputs_of(engine: EngineProcess, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


def is_there(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_can_not_be_made_is_told_and_leaves_no_process(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], Engine], type[PeftkitError], str, int]] = [
        (partial(Engine, tmp_path / "nothing-here"), BaseModelError, "nothing-here", 2),
        (Code("lambda: {}['missing']"), RunError, "KeyError: 'missing'", 1),
        (Code("lambda: __import__('sys').exit('a panic')"), RunError, "SystemExit: a panic", 1),
        (Code("nothing_of_this_name"), RunError, "NameError: name 'nothing_of_this_name'", 1),  # as one of `__main__`
        (Code("lambda: __import__('os').kill(__import__('os').getpid(), 9)"), RunError, "code -9", 1),
    ]
    engines = [EngineProcess() for _ in cases]
    for engine, (make, kind, message, code) in zip(engines, cases, strict=True):
        with pytest.raises(kind, match=message) as caught:
            engine.make(make)
        assert type(caught.value) is kind and caught.value.exit_code == code
        engine.stop()
        assert not is_there(engine.pid) and not engine.alive


async def test_signals_are_the_servers_and_a_killed_process_ends_every_stream(
    base_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineProcess()
    engine.make(partial(Engine, base_folder, device="cpu", num_pages=64, max_requests=2))
    engine.start()
    for ending in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, ending)
    assert len((await outputs_of(engine, ask(20, "whole")))[-1].token_ids) == 20
    tasks = [asyncio.create_task(outputs_of(engine, ask(150, f"r{n}"))) for n in range(4)]  # two run, two wait
    while engine.stats()["requests_running"] < 2:
        await asyncio.sleep(0.002)
    os.kill(engine.pid, signal.SIGSTOP)
    call = asyncio.create_task(engine.check_schema('{"type": "object"}'))
    await asyncio.sleep(0.05)
    assert engine.alive and not engine.died and not call.done()
    with caplog.at_level(logging.ERROR):
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            streams = await asyncio.gather(*tasks)
            with pytest.raises(RunError, match="died"):
                await call
            while "code -9" not in caplog.text:
                await asyncio.sleep(0.01)
    assert [outputs[-1].finish_reason for outputs in streams] == ["error"] * 4
    assert all("died" in str(outputs[-1].error) for outputs in streams)
    assert "".join(output.delta for output in streams[0]) == streams[0][-1].text
    assert engine.died and not engine.alive
    with pytest.raises(RunError, match="not running"):
        await outputs_of(engine, ask(1, "late"))
    with pytest.raises(RunError, match="not running"):
        await engine.add_adapter("a", base_folder)
    engine.stop()


async def test_a_process_that_stands_still_holds_up_nobody_and_is_sent_no_more_than_it_may(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_MOST_UNSENT", 2**20)
    engine = EngineProcess()
    engine.make(partial(Engine, base_folder, device="cpu", num_pages=64))
    engine.start()
    running = asyncio.create_task(outputs_of(engine, ask(150, "running")))
    while not engine.stats()["requests_running"]:
        await asyncio.sleep(0.002)
    os.kill(engine.pid, signal.SIGSTOP)
    tasks = [running, asyncio.create_task(outputs_of(engine, ask(1, "waiting")))]
    await asyncio.sleep(0)
    for request_id in ("running", "waiting", "of nobody"):
        engine.abort(request_id)
    async with asyncio.timeout(10):
        assert [outputs[-1].finish_reason for outputs in await asyncio.gather(*tasks)] == ["abort"] * 2
        with pytest.raises(RunError, match="does not take requests"):
            for number in range(100):
                asking = asyncio.create_task(outputs_of(engine, Request([1] * 100_000, None, request_id=f"r{number}")))
                await asyncio.wait([asking], timeout=0.01)
                engine.abort(f"r{number}")
                await asking
        os.kill(engine.pid, signal.SIGCONT)
        while True:
            try:
                assert len((await outputs_of(engine, ask(5, "next")))[-1].token_ids) == 5
                break
            except RunError:
                await asyncio.sleep(0.01)
        while engine.stats()["requests_running"] or engine.stats()["pages_used"]:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.stop)


NO_STANDARD_FILES = """
from peftkit.errors import RunError
from peftkit_serve import EngineProcess

engine = EngineProcess()
try:
    engine.make(__import__("collections").OrderedDict.clear)
except RunError as error:
    raise SystemExit(70 if str(error).startswith("TypeError") else str(error))
"""


def test_a_server_may_be_started_without_standard_input_and_output() -> None:
    command = 'exec "$0" -c "$1" 0<&- 1>&-'
    ended = subprocess.run(["sh", "-c", command, sys.executable, NO_STANDARD_FILES], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 70, ended.stderr


FAULTY = """
from peftkit_serve import Engine
from peftkit_serve.http import write_json_lines

def make():
    write_json_lines()
    engine = Engine({base!r}, device="cpu", num_pages=64)
    schedule, left = engine._scheduler.schedule, [5]
    def failing():
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError("a prompt that no log may show")
        return schedule()
    engine._scheduler.schedule = failing
    return engine
"""


async def test_an_engine_thread_that_dies_ends_its_process(
    base_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(base=str(base_folder)))
    engine = EngineProcess()
    engine.make(Code(f"__import__('runpy').run_path({str(script)!r})['make']"))
    engine.start()
    outputs = await outputs_of(engine, ask(100, "r"))
    assert outputs[-1].finish_reason == "error" and outputs[-1].error == "the engine died: ZeroDivisionError"
    assert 0 < len(outputs[-1].token_ids) < 5
    async with asyncio.timeout(10):
        while is_there(engine.pid) or not engine.died:
            await asyncio.sleep(0.01)
    assert not engine.alive
    engine.stop()
    said = capfd.readouterr().err
    (line,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert (line["message"], line["exception"]) == ("the engine thread died", "ZeroDivisionError")
    assert "no log may show" not in said


async def test_stopping_aborts_what_runs_and_ends_the_process(base_folder: Path) -> None:
    engine = EngineProcess()
    engine.make(partial(Engine, base_folder, device="cpu", num_pages=64, max_requests=1))
    engine.start()
    tasks = [asyncio.create_task(outputs_of(engine, ask(150, f"r{n}"))) for n in range(3)]
    while not engine.stats()["requests_running"]:
        await asyncio.sleep(0.002)
    await asyncio.to_thread(engine.stop)
    assert [outputs[-1].finish_reason for outputs in await asyncio.gather(*tasks)] == ["abort"] * 3
    assert not is_there(engine.pid) and not engine.alive and not engine.died
    engine.stop()  # once more does no harm


SERVER = """
import asyncio, sys
from functools import partial
from peftkit_serve import Engine, EngineProcess, Request, SamplingParams

async def run(engine):
    engine.start()
    async for output in engine.generate(Request([1], None, SamplingParams(max_tokens=150, ignore_eos=True))):
        pass
    print(engine.pid, flush=True)
    await asyncio.sleep(600)

engine = EngineProcess()
if {early}:
    print(engine.pid, flush=True)
    engine.make(partial(__import__("time").sleep, 600))
engine.make(partial(Engine, {base!r}, device="cpu", num_pages=64))
asyncio.run(run(engine))
"""


@pytest.mark.parametrize("early", [True, False])
def test_no_process_is_left_when_its_server_is_killed(base_folder: Path, early: bool) -> None:
    program = SERVER.format(base=str(base_folder), early=early)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_there(pid)
        server.kill()
        begin = time.monotonic()
        wait_until(lambda: not is_there(pid))
    if not early:  # else it may still be importing
        assert time.monotonic() - begin < 5
