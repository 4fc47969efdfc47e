"""Steady batches: decode steps at long contexts, adapters of all kinds together (S4), adapters that come and go (S5),
and what loaded adapters cost those who use none."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from pathlib import Path

import numpy as np

from peftkit_bench.serve_adapters import KINDS, RANK_16
from peftkit_bench.serve_fleet import Fleet, Line, ratio
from peftkit_bench.serve_http_figures import spread
from peftkit_bench.serve_inputs import workload
from peftkit_serve.adapters.store import Ticket
from peftkit_serve.pages import PAGE_TOKENS

_KINDS_GOAL, _CHURN_GOAL, _BASE_GOAL = 1.05, 1.5, 1.01
_FOLDERS = 4
_MOST_PAIRS = 3


def decode_case(fleet: Fleet, adapters: int, rows: int, context: int) -> Line:
    """S2 at a context: a decode step's time beside its floor, each row with the next of the adapters."""
    names = _rows(fleet.adapters(RANK_16, min(adapters, rows)), rows)
    steady = fleet.steady(names, context, fleet.sizes.repeats)
    times, filled_s, floor_ms = steady.step_ms, steady.filled_s, steady.floor_ms
    median = statistics.median(times)
    return {
        "case": "decode",
        "adapters": adapters,
        "batch": rows,
        "distinct": min(adapters, rows),
        "context": context,
        "step_ms": round(median, 3),
        "min_ms": round(min(times), 3),
        "max_ms": round(max(times), 3),
        "repeats": len(times),
        "tok_s": round(1e3 * rows / median, 1),
        "prefill_ms": round(1e3 * filled_s, 2),
        "prompt_tok_s": round(rows * context / filled_s, 1),
        "floor_ms": round(floor_ms, 3),
        "of_floor": round(floor_ms / median, 3),
    }


def kinds_case(fleet: Fleet) -> Line:
    """S4: LoRA, prefix, prompt, bottleneck and base rows in turn, against as many LoRA rows; every row its own
    adapter. Beside it each kind alone."""
    sizes = fleet.sizes
    each = -(-sizes.rows // (len(KINDS) + 1))
    of_kind = [fleet.adapters(family, each) for family in KINDS]
    mixed: list[str | None] = [name for some in zip(*of_kind, [None] * each, strict=True) for name in some]
    mixed = mixed[: sizes.rows]
    lora = fleet.adapters(RANK_16, sizes.rows)
    alone: dict[str, float] = {}
    for kind, names in zip(("lora", "prefix", "prompt", "bottleneck", "base"), (*of_kind, []), strict=True):
        alone[kind] = round(fleet.steady(_rows(names, sizes.rows), sizes.prompt).step_ms[0], 3)  # warms them up, too
    fleet.steady(lora, sizes.prompt)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(sizes.repeats):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(fleet.steady((lora, mixed)[which], sizes.prompt).step_ms[0])
    of_lora = ratio(times[1], times[0])
    return {
        "case": "kinds",
        "rows": sizes.rows,
        "of_each": each,
        "context": sizes.prompt,
        "lora_ms": spread(times[0], 3),
        "mixed_ms": spread(times[1], 3),
        "ratio": of_lora,
        "alone_ms": alone,
        "goals": {"ratio": _KINDS_GOAL},
        "met": {"ratio": of_lora["median"] <= _KINDS_GOAL},
    }


@dataclass
class _Churn:
    """Once a period one adapter goes and the next comes out of its folder; a request for it brings it to the device."""

    fleet: Fleet
    folders: Sequence[Path]
    loads_s: list[float] = field(default_factory=list[float])
    skipped: int = 0
    """Periods that ended before their adapter was there."""
    _ticket: Ticket | None = None
    _begun: float = 0.0
    _names: deque[str] = field(default_factory=deque[str])
    _number: int = 0

    def tick(self) -> None:
        """The beginning of a period."""
        if self._ticket is not None:
            self.skipped += 1
            return
        if self._names:
            self.fleet.engine.adapters.remove(self._names.popleft())
        self._begun = time.perf_counter()
        path = self.folders[self._number % len(self.folders)]
        self._ticket = self.fleet.engine.adapters.begin(f"churn-{self._number}", path)
        self._number += 1

    def poll(self) -> None:
        """Between two steps."""
        if self._ticket is not None and self._ticket.future.done():
            self.fleet.engine.adapters.register(self._ticket)
            self.loads_s.append(time.perf_counter() - self._begun)
            self._names.append(self._ticket.name)
            self.fleet.add(self._ticket.name, self.fleet.prompt(16), 1)
            self._ticket = None

    def end(self) -> None:
        """Nothing is left of it."""
        if self._ticket is not None:
            self._ticket.future.exception()  # waits for the load
            self.fleet.engine.adapters.cancel(self._ticket)
            self._ticket = None
        while self._names:
            self.fleet.engine.adapters.remove(self._names.pop())


@dataclass
class _Visits:
    """What churn is compared with: as many requests for an adapter that stays."""

    fleet: Fleet
    name: str

    def tick(self) -> None:
        self.fleet.add(self.name, self.fleet.prompt(16), 1)

    def poll(self) -> None: ...

    def end(self) -> None: ...


def churn_case(fleet: Fleet) -> Line:
    """S5: time between tokens of a steady batch while one adapter a second is loaded and one removed, against the same
    batch while as many requests come for an adapter that stays."""
    sizes = fleet.sizes
    folders = [fleet.maker.write(RANK_16, 10_000 + n, fleet.folder / f"churn-{n}") for n in range(_FOLDERS)]
    pairs = min(_MOST_PAIRS, sizes.repeats)
    rows, seconds = fleet.adapters(RANK_16, sizes.rows), sizes.seconds / (2 * pairs)
    churn = _Churn(fleet, folders)
    _gaps(fleet, rows, 2.5 * sizes.period_s, churn)  # for warmth: the first load of a folder reads its disk
    churn.loads_s.clear()
    gaps: tuple[list[list[float]], list[list[float]]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 else (1, 0):
            beside = churn if which else _Visits(fleet, rows[0])
            gaps[which].append(_gaps(fleet, rows, seconds, beside))
    line: Line = {
        "case": "churn",
        "rows": sizes.rows,
        "seconds": round(seconds, 2),
        "loads": len(churn.loads_s),
        "skipped": churn.skipped,
        "adapter_bytes": fleet.weight_bytes(rows[:1]),
    }
    if churn.loads_s:
        line["load_ms"] = spread([1e3 * one for one in churn.loads_s], 1)
    for name, runs in zip(("without", "with"), gaps, strict=True):
        line[name] = {f"p{p:g}_ms": spread([float(np.percentile(run, p)) for run in runs], 3) for p in (50, 99, 99.9)}
        line[name]["max_ms"] = spread([max(run) for run in runs], 3)
    p99 = [[float(np.percentile(run, 99)) for run in runs] for runs in gaps]
    line["ratio"] = ratio(p99[1], p99[0])
    met = {"ratio": line["ratio"]["median"] <= _CHURN_GOAL}
    return line | {"goals": {"ratio": _CHURN_GOAL}, "met": met}


def _gaps(fleet: Fleet, rows: Sequence[str], seconds: float, beside: _Churn | _Visits) -> list[float]:
    """Milliseconds between the tokens of the first row of a batch, which are those of every row."""
    sizes = fleet.sizes
    cells = PAGE_TOKENS * fleet.engine.stats()["pages_total"] // (len(rows) + 1)
    room = min(fleet.engine.room(), cells, 4096) - sizes.prompt
    fleet.fill(rows, sizes.prompt, room)
    row = next(iter(fleet.live))
    begun = now = due = time.perf_counter()
    times: list[float] = []
    while now - begun < seconds and row in fleet.live:
        if now >= due:
            beside.tick()
            due += sizes.period_s
        beside.poll()
        outputs = fleet.step()
        now = time.perf_counter()
        times += [now for output in outputs if output.request_id == row]
    fleet.clear()
    beside.end()
    return [1e3 * (end - start) for start, end in pairwise(times)]


def base_case(fleet: Fleet) -> Line:
    """Base-only traffic while adapters are on the device, against the same without any: decode, and S1 of many
    requests."""
    sizes = fleet.sizes
    rows, requests = [None] * sizes.rows, workload(4 * sizes.rows, 0, "uniform", fleet.spec.vocab_size)
    resident = 0
    step_ms: tuple[list[float], list[float]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])

    def run(which: int) -> None:
        nonlocal resident
        fleet.unload()
        if which:
            fleet.make_resident(fleet.adapters(RANK_16, sizes.loaded))
            resident = fleet.engine.stats()["adapters_resident"]
        step_ms[which].append(fleet.steady(rows, sizes.prompt).step_ms[0])
        begun = time.perf_counter()
        for prompt, _ in requests:
            fleet.add(None, fleet.prompt(min(len(prompt), sizes.long_context)), sizes.prompt)
        while fleet.live:
            fleet.step()
        seconds[which].append(time.perf_counter() - begun)

    fleet.steady(rows, sizes.prompt)
    for number in range(min(_MOST_PAIRS, sizes.repeats)):
        for which in (0, 1) if number % 2 else (1, 0):
            run(which)
    slower = {"decode": ratio(step_ms[1], step_ms[0]), "throughput": ratio(seconds[1], seconds[0])}
    return {
        "case": "base traffic",
        "rows": sizes.rows,
        "requests": len(requests),
        "adapters": sizes.loaded,
        "resident": resident,
        "without_ms": spread(step_ms[0], 3),
        "with_ms": spread(step_ms[1], 3),
        "without_s": spread(seconds[0], 3),
        "with_s": spread(seconds[1], 3),
        "time_ratio": slower,
        "goals": dict.fromkeys(slower, _BASE_GOAL),
        "met": {name: one["median"] <= _BASE_GOAL for name, one in slower.items()},
    }


def _rows(names: Sequence[str], count: int) -> list[str | None]:
    """So many rows, each with the next of the adapters; without any all are the base's."""
    return list(islice(cycle(names or [None]), count))
