"""What the times of `peftkit bench serve --http` say: pure functions of who sent what and when each event came."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Line = dict[str, Any]
_WINDOWS = 10
FULL_AFTER = 0.25
"""After this part of a run of two tenants both have requests waiting."""


@dataclass(frozen=True)
class Wave:
    """A plan of streams, once."""

    seconds: float
    tokens: int
    first_s: Sequence[float]
    """From each request to its first token."""
    gaps_s: Sequence[float]
    """Between one event of a stream and the next, all streams."""
    steady_gaps_s: Sequence[float]
    """Those of them while every stream had begun and none had ended."""
    events_per_token: float
    """Under 1 where tokens came together, because somebody was late."""
    loop_s: float
    """CPU time of the thread that takes the engine's outputs: of the service's event loop, with HTTP."""
    engine_s: float
    """CPU time of the engine's process."""
    client_share: float
    """Of a core, by the busiest client."""
    part_rates: Sequence[float]
    """Tokens/s in each tenth of the time."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_s(self) -> float:
        """CPU time of both."""
        return self.loop_s + self.engine_s


def wave(result: Mapping[str, Any], loop_s: float, engine_s: float) -> Wave:
    """The figures of one run; all its answers must be complete."""
    times = result["times"]
    bad = next((one for one in times if one["status"] != 200 or one["fault"]), None)
    assert bad is None, f"request {bad['index']} ended with status {bad['status']}: {bad['fault']}"
    all_begun = max(one["events"][0] for one in times)
    first_end = min(one["events"][-1] for one in times)
    gaps: list[float] = []
    steady: list[float] = []
    for one in times:
        events = np.array(one["events"])
        between = np.diff(events)
        gaps += between.tolist()
        steady += between[(events[:-1] >= all_begun) & (events[1:] <= first_end)].tolist()
    tokens = sum(one["tokens"] for one in times)
    edges = np.linspace(result["begun"], result["ended"], _WINDOWS + 1)
    counts, _ = np.histogram([event for one in times for event in one["events"]], edges)
    return Wave(
        seconds=result["ended"] - result["begun"],
        tokens=tokens,
        first_s=[one["events"][0] - one["sent"] for one in times],
        gaps_s=gaps,
        steady_gaps_s=steady or gaps,
        events_per_token=sum(len(one["events"]) for one in times) / tokens,
        loop_s=loop_s,
        engine_s=engine_s,
        client_share=result.get("cpu_share", 0.0),
        part_rates=(counts / np.diff(edges)).tolist(),
    )


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float | int]:
    """Median and range of repeats."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "repeats": len(values),
    }


def percentile_ms(waves: Sequence[Wave], of: str, percent: float) -> dict[str, float | int]:
    """A percentile of each repeat's times, in ms: `of` names them."""
    return spread([1e3 * float(np.percentile(getattr(one, of), percent)) for one in waves], 3)


def cost(alone: Sequence[Wave], http: Sequence[Wave]) -> Line:
    """What the service costs over the engine, by pairs of runs that followed each other."""
    ratios = [theirs.tokens_per_s / mine.tokens_per_s for mine, theirs in zip(alone, http, strict=True)]
    extra = [1e6 * (1 / theirs.tokens_per_s - 1 / mine.tokens_per_s) for mine, theirs in zip(alone, http, strict=True)]
    cpu = [mine.cpu_s / mine.tokens / theirs.cpu_s * theirs.tokens for mine, theirs in zip(alone, http, strict=True)]
    line: Line = {
        "ratio": spread(ratios, 4), "cost_us_token": spread(extra, 2), "cpu_ratio": spread(cpu, 4)
    }  # fmt: skip
    for name, waves in (("engine", alone), ("http", http)):
        line[name] = {
            "tok_s": _rate(waves),
            "first_p50_ms": percentile_ms(waves, "first_s", 50),
            "first_p99_ms": percentile_ms(waves, "first_s", 99),
            "between_p50_ms": percentile_ms(waves, "gaps_s", 50),
            "between_p99_ms": percentile_ms(waves, "gaps_s", 99),
            "steady_p50_ms": percentile_ms(waves, "steady_gaps_s", 50),
            "steady_p99_ms": percentile_ms(waves, "steady_gaps_s", 99),
            "events_per_token": spread([one.events_per_token for one in waves], 3),
            "loop_cpu_us_token": spread([1e6 * one.loop_s / one.tokens for one in waves], 2),
            "engine_cpu_us_token": spread([1e6 * one.engine_s / one.tokens for one in waves], 2),
        }
    line["client_cpu_share"] = spread([one.client_share for one in http], 2)
    return line


def _rate(waves: Sequence[Wave]) -> dict[str, float | int]:
    """Tokens/s of repeats; of a single run with its interval of 95 % by the rates of its parts."""
    found = spread([one.tokens_per_s for one in waves])
    if len(waves) > 1:
        return found
    half = 1.96 * statistics.stdev(waves[0].part_rates) / _WINDOWS**0.5
    return found | {"low": round(found["median"] - half, 1), "high": round(found["median"] + half, 1)}


def served(
    result: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], prices: tuple[float, float]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each tenant: seconds since the beginning, sorted, and the price of what was served at each of them.

    prices: of a prompt's token, which is served with the first generated one, and of a generated one.
    """
    complete = [one for one in result["times"] if one["tokens"]]
    usual = sum(one["tokens"] for one in complete) / max(1, sum(len(one["events"]) for one in complete))
    found: dict[str, tuple[list[float], list[float]]] = {}
    for one in result["times"]:
        asked = requests[one["index"]]
        times, priced = found.setdefault(asked["tenant"], ([], []))
        an_event = one["tokens"] / len(one["events"]) if one["tokens"] else usual  # tokens that came together
        for number, event in enumerate(one["events"]):
            times.append(event - result["begun"])
            priced.append(prices[1] * an_event + (0.0 if number else prices[0] * len(asked["prompt"])))
    sorted_: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for tenant, (times, priced) in found.items():
        order = np.argsort(times)
        sorted_[tenant] = np.array(times)[order], np.array(priced)[order]
    return sorted_


def fairness(
    services: Mapping[str, tuple[np.ndarray, np.ndarray]], tenants: tuple[str, str], seconds: float, batch_price: float
) -> Line:
    """How the difference of two tenants' served tokens grows, once both have requests waiting.

    batch_price: price of all requests that the engine has places for: the unit in which a difference is small.
    """
    grid = np.linspace(FULL_AFTER * seconds, seconds, 10 * _WINDOWS + 1)
    totals: list[np.ndarray] = []
    for tenant in tenants:
        times, priced = services[tenant]
        totals.append(np.concatenate([[0.0], np.cumsum(priced)])[np.searchsorted(times, grid)])
    difference = (totals[1] - totals[0]) - (totals[1][0] - totals[0][0])
    together = totals[0] + totals[1]
    steps = slice(None, None, 10)
    grown = np.diff(together[steps])
    growth = np.diff(difference[steps])[grown > 0] / grown[grown > 0]
    half = len(grid) // 2
    return {
        "served": {tenant: int(total[-1] - total[0]) for tenant, total in zip(tenants, totals, strict=True)},
        "growth": _mean(growth),
        "difference_first_half": round(float(np.abs(difference[: half + 1]).max()) / batch_price, 3),
        "difference_second_half": round(float(np.abs(difference[half:]).max()) / batch_price, 3),
        "difference_end": round(float(difference[-1]) / batch_price, 3),
    }


def least_waiting(result: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], tenant: str, begun: float) -> int:
    """The fewest of a tenant's requests that have waited for their first token at one time, from `begun` seconds on."""
    mine = [one for one in result["times"] if requests[one["index"]]["tenant"] == tenant and one["status"] != 429]
    sent = np.array([one["sent"] - result["begun"] for one in mine])
    started = np.array([one["events"][0] - result["begun"] if one["events"] else np.inf for one in mine])
    grid = np.linspace(begun, result["ended"] - result["begun"], 10 * _WINDOWS)
    return min(int(((sent <= at) & (started > at)).sum()) for at in grid[:-1])


def latencies(result: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], tenant: str) -> Line:
    """One tenant's times over its complete answers, and how many of its requests were refused or cut off."""
    mine = [one for one in result["times"] if requests[one["index"]]["tenant"] == tenant]
    complete = [one for one in mine if one["status"] == 200 and not one["fault"]]
    first = [one["events"][0] - one["sent"] for one in complete]
    whole = [one["events"][-1] - one["sent"] for one in complete]
    gaps = [gap for one in complete for gap in np.diff(one["events"]).tolist()]
    return {
        "requests": len(mine),
        "complete": len(complete),
        "refused": sum(one["status"] == 429 for one in mine),
        "first_p50_ms": _interval(first, 50),
        "first_p99_ms": _interval(first, 99),
        "between_p50_ms": _interval(gaps, 50),
        "between_p99_ms": _interval(gaps, 99),
        "whole_p50_ms": _interval(whole, 50),
    }


def _mean(values: np.ndarray) -> Line:
    """A mean with its interval of 95 %, of windows."""
    error = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5
    mean = float(values.mean())
    return {"mean": round(mean, 4), "low": round(mean - error, 4), "high": round(mean + error, 4)}


def _interval(values: Sequence[float], percent: float) -> Line:
    """A percentile in ms with its interval of 95 %, by resampling."""
    if not values:
        return {"value": None, "low": None, "high": None}
    chosen = np.array(values if len(values) <= 2000 else random.Random(0).sample(list(values), 2000))
    drawn = np.random.default_rng(0).choice(chosen, (200, len(chosen)))
    low, high = np.percentile(np.percentile(drawn, percent, axis=1), (2.5, 97.5))
    value = float(np.percentile(values, percent))
    return {"value": round(1e3 * value, 2), "low": round(1e3 * float(low), 2), "high": round(1e3 * float(high), 2)}
