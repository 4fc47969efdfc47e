"""The engine thread: streams, clients that go away, adapters that come and go beside running requests, failures."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from peftkit.errors import AdapterError, InputError, RunError
from peftkit_serve import AsyncEngine, Engine, Request, RequestOutput, SamplingParams
from peftkit_serve.adapters.store import NameTaken

MakeEngine = Callable[..., Engine]
Folder = Callable[..., Path]


def ask(prompt: list[int], adapter: str | None = None, max_tokens: int = 10, request_id: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    if request_id is None:
        return Request(prompt, adapter, sampling)
    return Request(prompt, adapter, sampling, request_id)


async def last_of(engine: AsyncEngine, request: Request) -> RequestOutput:
    outputs = [output async for output in engine.generate(request)]
    assert all(output.finish_reason is None for output in outputs[:-1])
    assert "".join(output.delta for output in outputs) == outputs[-1].text
    return outputs[-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[AsyncEngine]:
    async_engine = AsyncEngine(engine)
    async_engine.start()
    try:
        async with asyncio.timeout(60):
            yield async_engine
    finally:
        async_engine.stop()


def hold_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps wait until the returned event is set."""
    gate, step = threading.Event(), engine.step

    def held() -> list[RequestOutput]:
        assert gate.wait(20)
        return step()

    monkeypatch.setattr(engine, "step", held)
    return gate


async def test_concurrent_streams_give_what_solo_runs_give(
    make_engine: MakeEngine, lora_folder: Folder, prompt_folder: Folder, seed: int
) -> None:
    rng, engine = random.Random(seed), make_engine()
    engine.adapters.add("lora", lora_folder(seed))
    engine.adapters.add("prompt", prompt_folder(seed))
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 20))] for _ in range(9)]
    requests = [ask(prompt, ("lora", "prompt", None)[n % 3]) for n, prompt in enumerate(prompts)]
    expected = []
    for request in requests:
        (output,) = engine.generate([request])
        expected.append(output)
    async with running(engine) as async_engine:
        outputs = await asyncio.gather(*(last_of(async_engine, request) for request in requests))
        assert async_engine.alive
    # a client that comes late has several outputs as one
    assert [replace(one, delta="", started=None) for one in outputs] == [replace(one, delta="") for one in expected]
    assert not async_engine.alive and not async_engine.died


@pytest.mark.parametrize("when", ["before the first output", "between outputs"])
async def test_a_client_that_goes_away_frees_all_its_request_held(
    make_engine: MakeEngine, prompt_folder: Folder, seed: int, when: str
) -> None:
    engine = make_engine(max_tokens_per_step=8)
    engine.adapters.add("p", prompt_folder(seed))
    async with running(engine) as async_engine:
        other = asyncio.create_task(last_of(async_engine, ask([9, 9], None, 100)))
        task = asyncio.create_task(last_of(async_engine, ask([1] * 60, "p", 70)))
        if when == "between outputs":
            async with aclosing(async_engine.generate(ask([2], "p", 100))) as stream:
                await anext(stream)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await other).token_ids) == 100
        await until(lambda: not async_engine.stats()["requests_running"] + async_engine.stats()["requests_waiting"])
        await async_engine.remove_adapter("p")
        assert async_engine.stats()["pages_used"] == 0


async def test_refusals_reach_the_caller_and_harm_nobody(make_engine: MakeEngine) -> None:
    async with running(make_engine()) as engine:
        first = asyncio.create_task(last_of(engine, ask([1], None, 60, "same")))
        await until(lambda: engine.stats()["requests_running"] > 0)
        for request, field in (
            (ask([1], "x"), "model"),
            (ask([]), "prompt"),
            (ask([1], None, 5, "same"), "request_id"),
        ):
            with pytest.raises(InputError) as caught:
                await last_of(engine, request)
            assert caught.value.field == field
        assert len((await first).token_ids) == 60


async def test_adapters_come_and_go_while_others_stream(
    make_engine: MakeEngine, lora_folder: Folder, seed: int
) -> None:
    engine = make_engine()
    (expected,) = engine.generate([ask([4, 5], None, 100)])
    async with running(engine) as async_engine:
        stream = asyncio.create_task(last_of(async_engine, ask([4, 5], None, 100)))
        names = [f"a{n}" for n in range(5)]
        folders = [lora_folder(seed + n) for n in range(5)]
        entries = await asyncio.gather(*map(async_engine.add_adapter, names, folders))
        assert [entry.state for entry in entries] == ["ready"] * 5 and engine.adapters.names() == names
        outputs = await asyncio.gather(*(last_of(async_engine, ask([4, 5], name)) for name in names))
        assert len({output.token_ids for output in outputs}) == 5
        removed = await asyncio.gather(*map(async_engine.remove_adapter, names))
        assert [entry.state for entry in removed] == ["gone"] * 5
        assert (await stream).token_ids == expected.token_ids
        assert async_engine.stats()["adapters"] == async_engine.stats()["adapter_bytes"] == 0


async def test_a_bad_adapter_is_its_callers_error_only_and_its_name_stays_free(
    make_engine: MakeEngine, lora_folder: Folder, seed: int, tmp_path: Path
) -> None:
    async with running(make_engine()) as engine:
        with pytest.raises(AdapterError):
            await engine.add_adapter("a", tmp_path)
        with pytest.raises(InputError, match="1 to 128"):
            await engine.add_adapter("a/b", lora_folder(seed))
        results = await asyncio.gather(
            *(engine.add_adapter("a", lora_folder(seed)) for _ in range(3)), return_exceptions=True
        )
        assert [isinstance(result, NameTaken) for result in results] == [False, True, True]
        with pytest.raises(InputError):
            await engine.remove_adapter("b")
        assert engine.alive


async def test_adding_that_is_cancelled_registers_nothing(
    make_engine: MakeEngine, lora_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peftkit_serve.adapters.loader as loader

    reading, go_on, read = threading.Event(), threading.Event(), loader.read_adapter

    def slow(*args: object, **kwargs: object) -> object:
        reading.set()
        assert go_on.wait(20)
        return read(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "read_adapter", slow)
    async with running(make_engine()) as engine:
        task = asyncio.create_task(engine.add_adapter("a", lora_folder(seed)))
        await asyncio.to_thread(reading.wait)
        assert len((await last_of(engine, ask([1]))).token_ids) == 10, "the engine steps while a folder is read"
        with pytest.raises(InputError, match="loading"):
            await last_of(engine, ask([1], "a"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert engine.engine.adapters.names() == []
        await engine.add_adapter("a", lora_folder(seed))


async def test_removal_waits_for_running_requests(
    make_engine: MakeEngine, lora_folder: Folder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.adapters.add("a", lora_folder(seed))
    gate = hold_steps(engine, monkeypatch)
    async with running(engine) as async_engine:
        request = asyncio.create_task(last_of(async_engine, ask([1], "a", 30)))
        await asyncio.sleep(0.05)
        removal = asyncio.create_task(async_engine.remove_adapter("a"))
        await asyncio.sleep(0.05)
        assert not removal.done()
        gate.set()
        assert len((await request).token_ids) == 30
        assert (await removal).state == "gone"
        assert async_engine.stats()["adapter_bytes"] == 0


async def test_a_failing_step_ends_its_streams_with_an_error_and_the_engine_lives(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    async with running(engine) as async_engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
            outputs = await asyncio.gather(*(last_of(async_engine, ask([n])) for n in range(3)))
        assert [output.finish_reason for output in outputs] == ["error"] * 3
        assert outputs[0].error and "ZeroDivisionError" in outputs[0].error
        assert async_engine.alive and len((await last_of(async_engine, ask([1]))).token_ids) == 10


class Panic(BaseException):
    """As what pyo3 raises when a Rust library panics."""


@pytest.mark.parametrize("fault", [ZeroDivisionError, Panic])
async def test_a_dead_engine_thread_ends_every_stream_and_refuses_new_ones(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    lora_folder: Folder,
    seed: int,
    fault: type[BaseException],
) -> None:
    def fail() -> None:
        raise fault

    engine = make_engine()
    engine.adapters.add("a", lora_folder(seed))
    gate = hold_steps(engine, monkeypatch)
    async with running(engine) as async_engine:
        tasks = [asyncio.create_task(last_of(async_engine, ask([n], "a"))) for n in range(3)]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(async_engine.remove_adapter("a")))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        monkeypatch.setattr(engine._scheduler, "schedule", fail)
        assert not async_engine.died
        gate.set()
        *outputs, removal = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(output, "finish_reason", output) for output in outputs] == ["error"] * 3
        assert isinstance(removal, RunError)
        await until(lambda: not async_engine.alive)
        assert async_engine.died
        with pytest.raises(RunError, match="not running"):
            await last_of(async_engine, ask([1]))
    monkeypatch.undo()
    for task in list(engine._texts):
        engine.abort(task)


async def test_who_asked_for_what_the_engine_died_of_is_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def fail(request: Request) -> None:
        raise Panic

    monkeypatch.setattr(engine, "add_request", fail)
    async with running(engine) as async_engine:
        with pytest.raises(RunError, match="died: Panic"):
            await last_of(async_engine, ask([1]))
        await until(lambda: async_engine.died)


async def test_stopping_aborts_what_runs_and_waits_for_nobody(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_requests=1)
    gate = hold_steps(engine, monkeypatch)
    async with running(engine) as async_engine:
        tasks = [asyncio.create_task(last_of(async_engine, ask([n], None, 100))) for n in range(3)]
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(asyncio.to_thread(async_engine.stop))
        await asyncio.sleep(0.05)
        gate.set()
        await stopping
        assert [output.finish_reason for output in await asyncio.gather(*tasks)] == ["abort"] * 3
    assert not engine.has_work() and engine.stats()["pages_used"] == 0


async def test_an_idle_engine_checks_its_integrity(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import peftkit_serve.engine_thread as module

    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    engine = make_engine()
    checks: list[int] = []
    check = engine.check_integrity
    monkeypatch.setattr(engine, "check_integrity", lambda: (checks.append(1), check()))
    async with running(engine) as async_engine:
        await last_of(async_engine, ask([1]))
        await until(lambda: bool(checks))
        assert async_engine.alive
        engine._pages.take(1)  # a page that nobody holds; the check may come before the next request or after it
        with suppress(RunError):
            await last_of(async_engine, ask([1]))
        await until(lambda: not async_engine.alive)
    engine._pages.release([next(page for page in range(64) if engine._pages._references[page])])


def test_clients_whose_event_loop_closed_are_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async_engine = AsyncEngine(engine)
    async_engine.start()
    loop = asyncio.new_event_loop()
    stream = async_engine.generate(ask([1], None, 150))
    loop.run_until_complete(anext(stream))
    loop.close()  # without the shutdown that would close the stream
    asyncio.run(last_of(async_engine, ask([2])))
    asyncio.run(until(lambda: async_engine.stats()["requests_running"] == 0))
    assert async_engine.alive
    async_engine.stop()
