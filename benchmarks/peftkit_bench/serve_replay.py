"""S-LoRA's replay (Sheng et al. 2024, arXiv:2311.03285): requests at random times for up to thousands of adapters.

Requests arrive as a Poisson process at 1.2 times what the engine has just done of base-only traffic, whether it keeps
up or not, so that it is full all the time; a first token's latency counts from the arrival. The sign of a good design
is that thousands of adapters are served as fast as a few.
"""

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from peftkit_bench.serve_adapters import MIXED, RANK_8, Family
from peftkit_bench.serve_fleet import Fleet, Line

_OVERLOAD = 1.2
_RAMP = 1 / 3
"""Share of a run before what is counted: by then places are full, and requests of all lengths have ended."""
_PARTS = 10
_GOAL = 0.95


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the second at which it comes."""

    at: float
    prompt: list[int]
    max_tokens: int
    adapter: str | None


@dataclass(slots=True)
class Run:
    """What happened, in seconds since the beginning."""

    seconds: float
    arrived: dict[str, Arrival] = field(default_factory=dict[str, Arrival])
    first: dict[str, float] = field(default_factory=dict[str, float])
    ended: list[float] = field(default_factory=list[float])
    served: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Of each step its end and its tokens, a prompt's with its first one."""

    def rate(self) -> Line:
        """Requests/s and tokens/s behind the ramp, the first with an interval of 95 % by its parts."""
        edges = np.linspace(_RAMP * self.seconds, self.seconds, _PARTS + 1)
        length = float(edges[-1] - edges[0])
        rates = np.histogram(self.ended, edges)[0] / np.diff(edges)
        mean, half = float(rates.mean()), 1.96 * float(rates.std(ddof=1)) / math.sqrt(_PARTS)
        tokens = sum(number for at, number in self.served if edges[0] <= at < edges[-1])
        return {
            "requests_per_s": round(mean, 3),
            "low": round(mean - half, 3),
            "high": round(mean + half, 3),
            "tokens_per_s": round(tokens / length, 1),
        }

    def latency(self) -> Line:
        """First tokens' latency from the arrival, of all that have one."""
        waits = [1e3 * (at - self.arrived[request_id].at) for request_id, at in self.first.items()] or [math.nan]
        return {f"first_p{percent}_ms": round(float(np.percentile(waits, percent)), 2) for percent in (50, 99)}


def replay(fleet: Fleet, arrivals: Iterator[Arrival], seconds: float, most_live: float = math.inf) -> Run:
    """Gives the engine each request at its time, while no more than `most_live` have not ended; ends with what is
    left undone."""
    run, upcoming = Run(seconds), next(arrivals)
    begun = time.perf_counter()
    while (now := time.perf_counter() - begun) < seconds:
        while upcoming.at <= now and len(fleet.live) < most_live:
            run.arrived[fleet.add(upcoming.adapter, upcoming.prompt, upcoming.max_tokens)] = upcoming
            upcoming = next(arrivals)
        if not fleet.live:
            time.sleep(max(0.0, min(upcoming.at, seconds) - now))
            continue
        outputs = fleet.step()
        now, tokens = time.perf_counter() - begun, len(outputs)
        for output in outputs:
            if output.request_id not in run.first:
                run.first[output.request_id] = now
                tokens += output.num_prompt_tokens
            if output.finish_reason is not None:
                run.ended.append(now)
        run.served.append((now, tokens))
    fleet.clear()
    return run


def requests(fleet: Fleet, rate: float, adapters: Sequence[str], seed: int = 0) -> Iterator[Arrival]:
    """Arrivals at so many a second, lengths uniform, adapters too; times and lengths are the same for all fleets."""
    times, chosen = random.Random(seed), random.Random(seed + 1)
    low, high = fleet.sizes.lengths
    at = 0.0
    for _ in itertools.count():
        at += times.expovariate(rate) if math.isfinite(rate) else 0.0
        num_prompt, num_answer = times.randrange(low, high), times.randrange(low, high)
        yield Arrival(at, fleet.prompt(num_prompt), num_answer, chosen.choice(adapters) if adapters else None)


class Replays:
    """The replays of a run, each beside that of its family's fewest adapters."""

    def __init__(self) -> None:
        self._first: dict[str, Line] = {}

    def __call__(self, fleet: Fleet, family: Family, count: int) -> Iterator[Line]:
        """One replay's line, and before an engine's first one its capacity's."""
        if fleet.capacity is None:
            fleet.capacity = _capacity(fleet)
            yield fleet.capacity
        for other in (RANK_8, MIXED):
            if other is not family:
                fleet.unload(other)  # host memory is for one of them
        line = _replayed(fleet, family, count, fleet.capacity)
        first = self._first.setdefault(family.name, line)
        if first is not line:
            line["of_first"] = _quotient(line, first, "requests_per_s")
            line["tokens_of_first"] = _quotient(line, first, "tokens_per_s")
            if family is RANK_8 and count == fleet.sizes.replayed[-1]:
                line |= {"goals": {"of_first": _GOAL}, "met": {"of_first": (line["of_first"] or 0.0) >= _GOAL}}
        yield line


def _capacity(fleet: Fleet) -> Line:
    """What the engine does of base-only traffic with twice as many requests as it has places."""
    seconds = fleet.sizes.seconds / 2
    run = replay(fleet, requests(fleet, math.inf, ()), seconds, 2.0 * fleet.sizes.max_requests)
    return {"case": "capacity", "seconds": seconds, "finished": len(run.ended), **run.rate()}


def _replayed(fleet: Fleet, family: Family, count: int, capacity: Line) -> Line:
    begun = time.perf_counter()
    names = fleet.adapters(family, count)
    made_s = time.perf_counter() - begun
    rate = _OVERLOAD * max(1.0, capacity["requests_per_s"])
    preempted = fleet.engine.stats()["preemptions"]
    run = replay(fleet, requests(fleet, rate, names), fleet.sizes.seconds)
    line: Line = {
        "case": "replay",
        "ranks": list(family.ranks),
        "adapters": count,
        "adapters_made_s": round(made_s, 2),
        "host_bytes": fleet.weight_bytes(names),
        "lengths": list(fleet.sizes.lengths),
        "places": fleet.sizes.max_requests,
        "seconds": fleet.sizes.seconds,
        "offered_per_s": round(rate, 3),
        "requests": len(run.arrived),
        "finished": len(run.ended),
        "used": len({one.adapter for one in run.arrived.values()}),
        **run.rate(),
        "steps": len(run.served),
        "preemptions": fleet.engine.stats()["preemptions"] - preempted,
        **run.latency(),
    }
    return line | {"of_capacity": _quotient(line, capacity, "requests_per_s")}


def _quotient(line: Line, other: Line, figure: str) -> float | None:
    """None where a run was too short for anything to end."""
    return round(line[figure] / other[figure], 4) if other[figure] else None
