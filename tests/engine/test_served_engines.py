"""What the HTTP service asks of an engine gives the same from this process's thread and from a process of its own."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from peftkit.errors import AdapterError, InputError
from peftkit_serve import AsyncEngine, Engine, EngineProcess, Request, RequestOutput, SamplingParams
from peftkit_serve.adapters.store import NameTaken
from peftkit_serve.async_engine import ServedEngine

T = TypeVar("T")
Folder = Callable[..., Path]


class Host:
    """An engine on an event loop of its own."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.do(self._start())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _start(self) -> None:
        self.engine.start()

    def close(self) -> None:
        self.engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(scope="module")
def make(base_folder: Path) -> Callable[[], Engine]:
    sizes = {"max_tokens_per_step": 32, "max_requests": 8, "max_adapters": 2, "num_pages": 64}
    return partial(Engine, base_folder, device="cpu", deterministic=True, **sizes)


@pytest.fixture(scope="module", params=["thread", "process"])
def host(request: pytest.FixtureRequest, make: Callable[[], Engine]) -> Iterator[Host]:
    if request.param == "thread":
        engine = AsyncEngine(make())
    else:
        engine = EngineProcess()
        engine.make(make)
    host = Host(engine)
    yield host
    host.close()
    assert not engine.alive and not engine.died


@pytest.fixture(autouse=True)
def idle(host: Host) -> Iterator[None]:
    """Each test leaves the engine as it was, and that is known soon."""
    yield

    async def settled() -> None:
        async with asyncio.timeout(5):
            while (stats := host.engine.stats())["requests_running"] + stats["requests_waiting"] + stats["pages_used"]:
                await asyncio.sleep(0.002)
        assert stats["adapters"] == stats["adapter_bytes"] == 0 and host.engine.adapters.names() == []

    host.do(settled())
    assert host.engine.alive


def ask(prompt: str | list[int], adapter: str | None = None, max_tokens: int = 10, **fields: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | fields)
    return Request(prompt, adapter, sampling)


async def outputs_of(engine: ServedEngine, request: Request) -> list[RequestOutput]:
    outputs = [output async for output in engine.generate(request)]
    assert all(output.finish_reason is None for output in outputs[:-1])
    for before, output in pairwise(outputs):
        assert output.token_ids[: len(before.token_ids)] == before.token_ids
        assert output.logprobs[: len(before.logprobs)] == before.logprobs
        assert output.text == before.text + output.delta
    assert outputs[0].started is not None and all(output.started is None for output in outputs[1:])
    return outputs


async def last_of(engine: ServedEngine, request: Request) -> RequestOutput:
    return (await outputs_of(engine, request))[-1]


def test_every_field_of_an_output_is_what_the_engine_alone_gives(
    host: Host, make: Callable[[], Engine], lora_folder: Folder, seed: int
) -> None:
    rng, alone, folder = random.Random(seed), make(), lora_folder(seed)
    alone.adapters.add("red", folder)
    host.do(host.engine.add_adapter("red", folder))
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    requests = [
        ask("plain text", None, 40),
        ask([rng.randrange(256) for _ in range(70)], "red", 60, logprobs=3, prompt_logprobs=2),
        ask("é\U0001f600", "red", 30, temperature=1.0, seed=7, presence_penalty=0.5, logit_bias=((65, 5.0),)),
        ask("x", None, 100, stop=("e", "\ud800"), ignore_eos=False),
        ask("y", None, 60, json_schema=schema, temperature=1.0, seed=3),
        ask([5], "red", 1, logprobs=0),
    ]
    expected = {output.request_id: output for output in alone.generate(requests)}

    async def all_of() -> list[RequestOutput]:
        return await asyncio.gather(*(last_of(host.engine, request) for request in requests))

    for output in host.do(all_of()):
        assert replace(output, delta="", started=None) == replace(expected[output.request_id], delta="", started=None)
    host.do(host.engine.remove_adapter("red"))


def test_what_is_asked_at_once_is_the_engines_own(host: Host, make: Callable[[], Engine]) -> None:
    engine, alone = host.engine, make()
    assert engine.base == alone.base and engine.base.fingerprint == alone.base.fingerprint
    assert engine.tokenizer.get_vocab() == alone.tokenizer.get_vocab()
    assert engine.vocabulary.text([72, 105]) == alone.vocabulary.text([72, 105])
    assert [engine.room(number) for number in (0, 7, 16, 20)] == [alone.room_behind(n) for n in (0, 7, 16, 20)]
    fixed = ("pages_total", "adapter_slots", "weight_bytes", "kv_bytes", "adapter_capacity_bytes")
    assert all(engine.stats()[name] == alone.stats()[name] for name in fixed)


def test_refusals_reach_the_caller_and_harm_nobody(host: Host) -> None:
    async def refused(request: Request, field: str, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            await last_of(host.engine, request)
        assert caught.value.field == field

    async def all_of() -> None:
        other = asyncio.create_task(last_of(host.engine, replace(ask([1], None, 100), request_id="same")))
        while not host.engine.stats()["requests_running"]:
            await asyncio.sleep(0.002)
        await refused(ask([1], "nobody"), "model", "nobody")
        await refused(ask([]), "prompt", "empty")
        await refused(replace(ask([1]), request_id="same"), "request_id", "in use")
        await refused(ask("\U0001f600" * 125_000), "prompt", "500000 tokens")  # nothing of it is lost on the way
        await refused(ask([7] * 500_000), "prompt", "500000 tokens")
        with pytest.raises(Exception, match=r"surrogate|Unicode|TypeError|TextInput"):
            await last_of(host.engine, ask("half of a pair: \ud800"))
        assert len((await other).token_ids) == 100

    host.do(all_of())


def test_an_aborted_request_and_a_client_that_goes_away_end_within_a_step(host: Host) -> None:
    async def both() -> None:
        other = asyncio.create_task(last_of(host.engine, ask([3], None, 140)))
        request = ask([1], None, 140)
        stream = host.engine.generate(request)
        await anext(stream)
        host.engine.abort(request.request_id)
        *_, last = [output async for output in stream]
        assert last.finish_reason == "abort" and len(last.token_ids) < 140
        waiting = asyncio.create_task(last_of(host.engine, ask([2], None, 140)))
        async with aclosing(host.engine.generate(ask([2], None, 140))) as stream:
            first = await anext(stream)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(first.token_ids) < 100 and len((await other).token_ids) == 140

    before = host.engine.stats()["generated_tokens"]
    host.do(both())
    assert host.engine.stats()["generated_tokens"] - before < 4 * 140 - 100


def test_a_slow_reader_finds_all_tokens_once_and_in_order(host: Host, make: Callable[[], Engine]) -> None:
    (expected,) = make().generate([ask([9], None, 150, logprobs=1)])

    async def slowly() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        async for output in host.engine.generate(ask([9], None, 150, logprobs=1)):
            outputs.append(output)
            await asyncio.sleep(0.2)
        return outputs

    outputs = host.do(slowly())
    assert len(outputs) < 50, "what has come meanwhile is one output"
    assert (outputs[-1].token_ids, outputs[-1].logprobs) == (expected.token_ids, expected.logprobs)
    assert "".join(output.delta for output in outputs) == outputs[-1].text == expected.text
    assert outputs[0].started is not None and outputs[-1].num_prompt_tokens == 1


def test_adapters_come_and_go_and_a_removal_waits_for_its_requests(
    host: Host, lora_folder: Folder, prompt_folder: Folder, seed: int, tmp_path: Path
) -> None:
    engine = host.engine

    async def life() -> None:
        entries = await asyncio.gather(
            engine.add_adapter("moved", lora_folder(seed)), engine.add_adapter("soft", prompt_folder(seed))
        )
        assert [(entry.name, entry.version, entry.state) for entry in entries] == [
            ("moved", 1, "ready"),
            ("soft", 1, "ready"),
        ]
        assert sorted(engine.adapters.names()) == ["moved", "soft"] and engine.stats()["adapters"] == 2
        assert engine.adapters.get("moved") == entries[0] and engine.adapters.uid("soft") == entries[1].uid
        with pytest.raises(NameTaken):
            await engine.add_adapter("moved", lora_folder(seed))
        with pytest.raises(InputError, match="1 to 128"):
            await engine.add_adapter("a/b", lora_folder(seed))
        with pytest.raises(AdapterError, match=r"bad|adapter_config"):
            await engine.add_adapter("bad", tmp_path / "bad")
        with pytest.raises(InputError, match="nobody"):
            await engine.remove_adapter("nobody")
        running = asyncio.create_task(last_of(engine, ask([1], "moved", 140)))
        async with asyncio.timeout(10):
            while engine.stats()["running_adapters"] != [entries[0].uid]:  # another thread may be midway to it
                await asyncio.sleep(0.002)
        entry = engine.adapters.get("moved")
        assert entry.references == 1 and entry.resident
        removal = asyncio.create_task(engine.remove_adapter("moved"))
        while "moved" in engine.adapters.names():
            await asyncio.sleep(0.002)
        assert not running.done() and not removal.done()
        with pytest.raises(InputError):
            engine.adapters.get("moved")
        with pytest.raises(InputError):
            await last_of(engine, ask([1], "moved"))
        assert len((await running).token_ids) == 140 and (await removal).state == "gone"
        again = await engine.add_adapter("moved", lora_folder(seed + 1))
        assert again.version == 2 and again.uid != entries[0].uid
        await asyncio.gather(engine.remove_adapter("moved"), engine.remove_adapter("soft"))

    host.do(life())


def test_any_mixture_of_clients_is_answered_as_each_alone(
    host: Host, make: Callable[[], Engine], lora_folder: Folder, seed: int
) -> None:
    rng, alone = random.Random(seed), make()
    names = ["mix0", "mix1", None]
    for number, name in enumerate(names[:2]):
        alone.adapters.add(str(name), lora_folder(seed + number))
        host.do(host.engine.add_adapter(str(name), lora_folder(seed + number)))
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(60)]
    requests = [ask(prompt, rng.choice(names), rng.randint(1, 60)) for prompt in prompts]
    expected = {output.request_id: output for output in alone.generate(requests)}

    async def client(request: Request, how: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        last: RequestOutput | None = None
        async with aclosing(host.engine.generate(request)) as outputs:
            async for last in outputs:
                if how == "leaves" and last.token_ids:
                    break
                if how == "aborts":
                    host.engine.abort(request.request_id)
                if how == "slow":
                    await asyncio.sleep(0.05)
        assert last is not None
        whole = expected[request.request_id]
        assert last.token_ids == whole.token_ids[: len(last.token_ids)]
        assert whole.text.startswith(last.text.rstrip("\ufffd"))  # an end may be in the middle of a character
        if how in ("reads", "slow"):
            assert (last.token_ids, last.text, last.finish_reason) == (whole.token_ids, whole.text, "length")

    async def all_of() -> None:
        hows = [rng.choice(["reads", "reads", "slow", "leaves", "aborts"]) for _ in requests]
        clients = [client(one, how, rng.random()) for one, how in zip(requests, hows, strict=True)]
        await asyncio.gather(*clients)
        await asyncio.gather(*(host.engine.remove_adapter(str(name)) for name in names[:2]))
        await asyncio.sleep(1.3)  # after a second without work the engine checks its own integrity, and dies of a fault

    host.do(all_of())


def test_adding_that_is_cancelled_leaves_the_name_free(host: Host, lora_folder: Folder, seed: int) -> None:
    async def cancelled() -> None:
        folder = lora_folder(seed)
        for wait_s in (0.0, 0.001, 0.003, 0.1):
            task = asyncio.create_task(host.engine.add_adapter("red", folder))
            await asyncio.sleep(wait_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(10):
                while True:  # either it has come to nothing, or the name is there and can go
                    try:
                        if "red" not in host.engine.adapters.names():
                            await host.engine.add_adapter("red", folder)
                        await host.engine.remove_adapter("red")
                        break
                    except InputError:
                        await asyncio.sleep(0.002)

    host.do(cancelled())


def test_a_schema_is_checked_before_its_request(host: Host) -> None:
    async def checked() -> None:
        await host.engine.check_schema(json.dumps({"type": "object"}))
        with pytest.raises(InputError, match="can't be kept") as caught:
            await host.engine.check_schema(json.dumps({"type": "nothing"}))
        assert caught.value.field == "json_schema"

    host.do(checked())
