"""An engine over a random base with a fleet of random adapters, and how `peftkit bench serve` drives it."""

import gc
import itertools
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peftkit.base import Quant, auto_device, auto_dtype
from peftkit_bench.serve import step_floor_s
from peftkit_bench.serve_adapters import MIXED, RANK_16, AdapterMaker, Family, mean_lora_bytes
from peftkit_bench.serve_http_figures import spread
from peftkit_bench.serve_inputs import SHAPES, RandomBase, random_tensors, write_base
from peftkit_serve import Engine, Request, RequestOutput, SamplingParams
from peftkit_serve.adapters.loader import LoadedAdapter
from peftkit_serve.models.spec import read_spec

_MAX_POSITIONS = 8192
_WARM_STEPS = 4
_ROOM = 1.1
"""Adapter memory over what as many average adapters as there are slots need: some steps have larger ones."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What the cases of a fleet measure; the defaults are for a GPU."""

    shape: str
    quant: Quant = "none"
    device: str = "auto"
    num_pages: int | None = None
    seconds: float = 60.0
    """Of each replay; of churn altogether."""
    repeats: int = 5
    steps: int = 64
    """Timed together."""
    rows: int = 64
    """Of a steady batch."""
    prompt: int = 128
    long_context: int = 4096
    mean_length: int = 512
    """Of the sequences whose pages' waste is counted."""
    max_requests: int = 256
    """Slots for adapters too."""
    max_tokens_per_step: int = 2048
    lengths: tuple[int, int] = (8, 512)
    """Of a replay's prompts and answers: from, and up to but without."""
    replayed: tuple[int, ...] = (5, 100, 1000, 2000)
    """Adapters of rank 8."""
    replayed_mixed: tuple[int, ...] = (5, 100, 500)
    """Adapters of several ranks."""
    loaded: int = 128
    """Adapters beside which base-only traffic is measured."""
    period_s: float = 1.0
    """Of churn: one adapter comes and one goes."""


def sizes_of(shape: str, quant: Quant, device: str, num_pages: int | None, seconds: float, *, quick: bool) -> Sizes:
    """What the command's options mean; on a CPU everything is small."""
    if quick:
        seconds = min(seconds, 10.0)
    if auto_device(device).type == "cuda":
        return Sizes(shape, quant, device, num_pages, seconds, repeats=2 if quick else 5)
    return Sizes(
        shape, quant, device, num_pages, seconds, repeats=1 if quick else 2, steps=4, rows=5, prompt=16,
        long_context=64, max_requests=8, max_tokens_per_step=64, lengths=(2, 12), replayed=(3, 12),
        replayed_mixed=(2, 6), loaded=4, period_s=min(1.0, seconds / 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Steady:
    """What a steady batch took."""

    step_ms: list[float]
    """Of each block of steps, on average."""
    filled_s: float
    """Until all rows had their first token."""
    floor_ms: float
    """What a step takes at least, halfway."""


class Fleet:
    """The engine and its adapters."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "base").mkdir()
        begun = time.perf_counter()
        base = RandomBase(sizes.shape, write_base(self.folder / "base", SHAPES[sizes.shape], _MAX_POSITIONS))
        spec, device = read_spec(base.path), auto_device(sizes.device)
        dtype = auto_dtype("auto", device)
        mixed = sizes.max_requests * mean_lora_bytes(MIXED, spec, dtype)
        alike = (sizes.loaded + sizes.rows) * mean_lora_bytes(RANK_16, spec, dtype)
        rounding = sizes.max_requests * spec.num_layers * (64 << 10)
        self.engine = Engine(
            base,
            quant=sizes.quant,
            device=sizes.device,
            max_tokens_per_step=sizes.max_tokens_per_step,
            max_requests=sizes.max_requests,
            max_adapters=sizes.max_requests,
            num_pages=sizes.num_pages,
            prefix_cache=False,  # prompts come again in each repeat
            adapter_bytes=int(_ROOM * max(mixed, alike)) + rounding,
            source=random_tensors,
        )
        self.engine_s = time.perf_counter() - begun
        self.spec, self.on_gpu = spec, device.type == "cuda"
        self.maker = AdapterMaker(spec, dtype, device)
        self.capacity: Line | None = None
        """Of base-only traffic, once it has been measured."""
        self._held: dict[str, LoadedAdapter] = {}
        self._registered: set[str] = set()
        self._live: dict[str, None] = {}
        self._ids = map(str, itertools.count())
        self._rng = np.random.default_rng(0)

    def close(self) -> None:
        """Removes its folders; its memory is free with the last reference."""
        self._folder.cleanup()

    @property
    def live(self) -> Collection[str]:
        """Requests that have not ended, in the order in which they came."""
        return self._live.keys()

    def adapters(self, family: Family, count: int) -> list[str]:
        """Names of a family's first `count` adapters, which are made, and known to the engine, from now on."""
        names = [f"{family.name}-{number}" for number in range(count)]
        for number, name in enumerate(names):
            if name not in self._held:
                self._held[name] = self.maker.make(family, number)
            if name not in self._registered:
                self.engine.adapters.add_loaded(name, self._held[name])
                self._registered.add(name)
        return names

    def nbytes(self, names: Sequence[str]) -> int:
        """What adapters take of adapter memory."""
        return sum(one.nbytes for one in (self._held[name] for name in names) if one.weights is not None)

    def weight_bytes(self, names: Sequence[str]) -> int:
        """What adapters' weights are, without padding."""
        packed = [self._held[name].weights for name in names]
        return sum(layer.weights.nbytes for one in packed if one is not None for layer in one.layers)

    def unload(self, family: Family | None = None) -> None:
        """The engine forgets all adapters; `family`'s are forgotten here too, so that host memory is free."""
        for name in self._registered:
            self.engine.adapters.remove(name)
        self._registered.clear()
        if family is not None:
            self._held = {name: one for name, one in self._held.items() if not name.startswith(f"{family.name}-")}

    def evict(self, name: str) -> None:
        """Leaves an adapter that no request needs in host memory only."""
        self.engine.adapters.remove(name)
        self.engine.adapters.add_loaded(name, self._held[name])

    def make_resident(self, names: Sequence[str]) -> None:
        """Brings adapters onto the device, by a request each."""
        self.fill(names, prompt=16, max_tokens=1)

    def prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no prompt before had."""
        return self._rng.integers(10, self.spec.vocab_size - 10, num_tokens).tolist()

    def add(self, adapter: str | None, prompt: list[int], max_tokens: int) -> str:
        """Queues a greedy request that goes on to `max_tokens`; its id."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(prompt=prompt, adapter=adapter, request_id=next(self._ids), sampling=params)
        self._live[self.engine.add_request(request)] = None
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine."""
        outputs = self.engine.step()
        for output in outputs:
            assert output.finish_reason in (None, "length"), output
            if output.finish_reason is not None:
                del self._live[output.request_id]
        return outputs

    def fill(self, rows: Sequence[str | None], prompt: int | Sequence[int], max_tokens: int | None = None) -> float:
        """Requests with these adapters and lengths, until each has its first token; the seconds that took.

        max_tokens: None goes on for as long as the context reaches.
        """
        lengths = [prompt] * len(rows) if isinstance(prompt, int) else prompt
        prompts = [self.prompt(length) for length in lengths]
        begun = time.perf_counter()
        most = max_tokens or self.engine.room()
        waiting = {self.add(one, tokens, most) for one, tokens in zip(rows, prompts, strict=True)}
        while waiting:
            waiting -= {output.request_id for output in self.step()}
        return time.perf_counter() - begun

    def first_token_s(self, adapter: str | None, prompt: int) -> float:
        """From a request to its only token, while others run on."""
        tokens = self.prompt(prompt)
        begun = time.perf_counter()
        request_id = self.add(adapter, tokens, 1)
        while request_id in self._live:
            self.step()
        return time.perf_counter() - begun

    def steady(self, rows: Sequence[str | None], context: int, blocks: int = 1) -> Steady:
        """Decode steps of rows whose prompts have `context` tokens, timed in blocks of steps."""
        steps = self.sizes.steps
        filled_s = self.fill(rows, context)
        for _ in range(_WARM_STEPS):
            self.step()
        running = self.engine._scheduler.running
        reached = sum(one.num_positions for one in running) / len(running)
        times: list[float] = []
        for _ in range(blocks):
            begun = time.perf_counter()
            for _ in range(steps):
                self.step()
            times.append(1e3 * (time.perf_counter() - begun) / steps)
        assert len(running) == len(rows) == len(self.live), "a row has ended or waits"
        self.clear()
        distinct = sorted({name for name in rows if name is not None})
        floor_s = step_floor_s(self.engine, len(rows), round(reached + steps * blocks / 2), self.nbytes(distinct))
        return Steady(times, filled_s, 1e3 * floor_s)

    def clear(self) -> None:
        """Ends all requests."""
        for request_id in self._live:
            self.engine.abort(request_id)
        self._live.clear()
        self.engine.check_integrity()


def ratio(times: Sequence[float], others: Sequence[float]) -> dict[str, float | int]:
    """Median and range of the quotients of two measures that were taken in turn."""
    return spread([mine / theirs for mine, theirs in zip(times, others, strict=True)], 4)


def release_memory() -> None:
    """Gives what an engine held back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
