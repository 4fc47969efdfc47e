"""Everything at once under tight memory, for as long as `--duration` says, against each request alone.

pytest tests/engine/test_fuzz.py --duration 600
pytest tests/engine/test_fuzz.py --duration 180 -m gpu
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from peftkit.errors import InputError
from peftkit_serve import AsyncEngine, Engine, Request, RequestOutput, SamplingParams

Folder = Callable[..., Path]
EveryKind = Callable[..., dict[str, Path]]
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)
WAYS: list[dict[str, Any]] = [
    {"top_k": 7, "top_p": 0.8}, {"min_p": 0.1}, {"logprobs": 2}, {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.8}, {"logit_bias": ((65, 9.0),)}, {"prompt_logprobs": 1}, {"json_schema": SCHEMA},
    {"stop": ("a", "e ")}, {"ignore_eos": False},
]  # fmt: skip


@pytest.fixture
def duration(request: pytest.FixtureRequest) -> float:
    """Seconds that a run takes."""
    return request.config.getoption("--duration", default=None) or 3.0


class Traffic:
    """Random requests and adapters for an engine; knows what each request was asked with, and checks its answer."""

    def __init__(self, engine: Engine, oracle: Engine, folders: list[Path], rng: random.Random) -> None:
        self.engine, self.oracle, self.folders, self.rng = engine, oracle, folders, rng
        self.content: dict[str, int] = {}  # live name → folder
        self.asked: dict[str, Request] = {}  # by id: what the oracle is asked, the adapter by its content
        self.heads = [[], [], *([rng.randrange(256) for _ in range(size)] for size in (16, 20))]  # what many begin with
        self.num_checked = self.num_whole = 0
        for number, folder in enumerate(folders):
            oracle.adapters.add(str(number), folder)

    def requests(self) -> list[Request]:
        """One, or several of one prompt with draws of their own."""
        rng = self.rng
        vocab = min(256, self.engine.spec.vocab_size)
        prompt = [
            *rng.choice(self.heads),
            *(rng.randrange(vocab) for _ in range(rng.choice((1, 5, rng.randint(1, 20))))),
        ]
        name = rng.choice([None, *self.content])
        ways: dict[str, Any] = {"ignore_eos": True} | rng.choice([{}, {}, {}, *WAYS])
        params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=rng.choice((0.0, 1.0)), **ways)
        seeds = [rng.randrange(2**31) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
        made = [Request(prompt, name, replace(params, seed=one)) for one in seeds]
        for one in made:
            content = None if name is None else str(self.content[name])
            self.asked[one.request_id] = Request(prompt, content, one.sampling)
        return made

    def free_name(self) -> tuple[str, int] | None:
        """A name to add and its content; names come back, with other content too, and one content has several."""
        name = f"name-{self.rng.randrange(len(self.folders))}"
        return None if name in self.content else (name, self.rng.randrange(len(self.folders)))

    def check(self, output: RequestOutput) -> None:
        """The last output of a request is its solo run, or the beginning of it if it was aborted."""
        asked = self.asked.pop(output.request_id)
        (alone,) = self.oracle.generate([asked])
        where = (asked.adapter, asked.sampling, output.finish_reason, output.error)
        assert output.finish_reason in ("length", "stop", "abort"), where
        assert output.token_ids == alone.token_ids[: len(output.token_ids)], where
        if output.finish_reason != "abort":
            assert (output.finish_reason, output.text, output.token_ids) == (
                alone.finish_reason,
                alone.text,
                alone.token_ids,
            ), where
            reports = zip(
                (*output.logprobs, *output.prompt_logprobs), (*alone.logprobs, *alone.prompt_logprobs), strict=True
            )
            assert all(ours.token_id == solo.token_id for ours, solo in reports), where
            self.num_whole += 1
        self.num_checked += 1

    def check_nothing_held(self) -> None:
        """Without names and requests, all is free."""
        for name in list(self.content):
            self.engine.adapters.remove(name)
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats["pages_free"] == stats["pages_total"] and not self.asked
        assert stats["adapter_bytes"] == stats["adapters_resident"] == stats["adapters"] == 0


def drive(traffic: Traffic, seconds: float) -> None:
    """Joins, steps, aborts, loads, replacements and removals in random order, until the time is over."""
    engine, rng = traffic.engine, traffic.rng
    until = time.monotonic() + seconds
    while time.monotonic() < until or engine.has_work():
        over = time.monotonic() >= until
        action = "step" if over else rng.choices(["join", "step", "abort", "add", "remove"], [6, 20, 1, 1, 1])[0]
        if action == "join" and len(traffic.asked) < 12:
            for one in traffic.requests():
                engine.add_request(one)
        elif action == "step":
            for output in engine.step():
                if output.finish_reason is not None:
                    traffic.check(output)
        elif action == "abort" and traffic.asked:
            output = engine.abort(rng.choice(list(traffic.asked)))
            if output is not None:
                traffic.check(output)
        elif action == "add" and (found := traffic.free_name()) is not None:
            name, content = found
            engine.adapters.add(name, traffic.folders[content])
            traffic.content[name] = content
        elif action == "remove" and traffic.content:
            engine.adapters.remove(name := rng.choice(list(traffic.content)))
            del traffic.content[name]
        if not engine._runner.on_gpu or rng.random() < 0.02:  # on a GPU it waits for all that should run side by side
            engine.check_integrity()
    traffic.check_nothing_held()
    assert engine.stats()["preemptions"] > 0 or seconds < 20, "memory was not tight"
    assert engine.stats()["cached_tokens"] > 0, "no prompt began as another"


async def serve(traffic: Traffic, seconds: float) -> None:
    """The same from clients of an engine thread: streams that are read to the end, aborted, or left."""
    rng, until = traffic.rng, time.monotonic() + seconds
    engine = AsyncEngine(traffic.engine)
    finished: list[RequestOutput] = []
    left: list[str] = []
    removed: set[str | None] = set()

    async def read(one: Request, leaves_after: int) -> None:
        try:
            await read_stream(one, leaves_after)
        except InputError as error:  # its adapter went between the choice and the call
            assert "there is no adapter named" in str(error) and one.adapter in removed
            del traffic.asked[one.request_id]

    async def read_stream(one: Request, leaves_after: int) -> None:
        async with aclosing(engine.generate(one)) as outputs:
            async for output in outputs:
                if output.finish_reason is not None:
                    finished.append(output)
                elif len(output.token_ids) >= leaves_after:
                    left.append(one.request_id)
                    return
                elif rng.random() < 0.01:
                    engine.abort(one.request_id)

    async def client() -> None:
        while time.monotonic() < until:
            made = traffic.requests()
            await asyncio.gather(*(read(one, rng.choice((3, 99, 99, 99))) for one in made))

    async def operator() -> None:
        while time.monotonic() < until:
            if traffic.content and rng.random() < 0.4:
                name = rng.choice(list(traffic.content))
                del traffic.content[name]
                removed.add(name)
                await engine.remove_adapter(name)
            elif (found := traffic.free_name()) is not None:
                await engine.add_adapter(found[0], traffic.folders[found[1]])
                traffic.content[found[0]] = found[1]
            await asyncio.sleep(0.003)

    engine.start()
    try:
        async with asyncio.timeout(seconds + 120):
            await asyncio.gather(*(client() for _ in range(6)), operator())
    finally:
        engine.stop()
    assert left and finished
    for request_id in left:
        del traffic.asked[request_id]
    for output in finished:
        traffic.check(output)
    traffic.check_nothing_held()


@pytest.fixture
def make_traffic(
    make_engine: Callable[..., Engine], every_kind: EveryKind, lora_folder: Folder, seed: int
) -> Callable[..., Traffic]:
    def make(config: PretrainedConfig | None = None, **settings: Any) -> Traffic:
        rng = random.Random(seed)
        chosen = {} if config is None else {"config": config}
        folders = [lora_folder(seed + n, r=rng.choice([1, 20, 40, 70]), **chosen) for n in range(3)]
        folders += every_kind(seed + 10, **chosen).values()
        base = {name: settings.pop(name) for name in ("base", "device") if name in settings}
        tight: dict[str, Any] = {"num_pages": 12, "max_requests": 6, "max_adapters": 3, "adapter_bytes": 8 << 16}
        engine = make_engine(**base, **(tight | settings))
        return Traffic(engine, make_engine(max_adapters=16, prefix_cache=False, **base), folders, rng)

    return make


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "padded and overlapped"])
def test_any_mixture_answers_each_request_as_it_would_be_answered_alone(
    make_traffic: Callable[..., Traffic], duration: float, ahead: bool
) -> None:
    traffic = make_traffic(graphs=ahead, overlap=ahead)
    drive(traffic, duration)
    print(f"{traffic.num_checked} requests, {traffic.num_whole} of them to the end")
    assert traffic.num_whole > 5


async def test_any_mixture_of_clients_is_answered_likewise(
    make_traffic: Callable[..., Traffic], duration: float
) -> None:
    traffic = make_traffic(graphs=True, overlap=True)
    await serve(traffic, duration / 2)
    assert traffic.num_whole > 5


@pytest.mark.gpu
def test_any_mixture_on_a_gpu(
    make_traffic: Callable[..., Traffic], tiny_base: Path, own_cache: None, duration: float
) -> None:
    config = AutoConfig.from_pretrained(tiny_base)
    traffic = make_traffic(config, base=tiny_base, device="cuda", num_pages=16, adapter_bytes=12 << 16)
    drive(traffic, duration)
    print(f"{traffic.num_checked} requests, {traffic.num_whole} of them to the end")
    assert traffic.num_whole > 5 and torch.cuda.is_available()


@pytest.mark.gpu
async def test_any_mixture_of_clients_on_a_gpu(
    make_traffic: Callable[..., Traffic], tiny_base: Path, own_cache: None, duration: float
) -> None:
    config = AutoConfig.from_pretrained(tiny_base)
    await serve(make_traffic(config, base=tiny_base, device="cuda", num_pages=16, adapter_bytes=12 << 16), duration / 2)
