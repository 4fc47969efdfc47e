"""Where a step's time goes on a GPU: kernels of torch's profiler by what they do, and the time in which none runs."""

import cProfile
import pstats
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from peftkit_bench.serve_adapters import RANK_16
from peftkit_bench.serve_fleet import Fleet, Line

GROUPS = (
    ("attention", r"(prefill|decode|steady)_kernel|combine|flash|fmha|sdpa"),
    ("adapters", r"_(shrink|expand|down|down_rows|up)|expand_walk"),
    ("norm, rope, gate", r"_rms_norm|rope_kernel|_gated"),
    ("sampling", r"_(peak|limit|draw)|.*(argmax|softmax|multinomial).*"),
    (
        "linears",
        r"(few|wide|scaled|spread|\w*parts)_kernel|_(linear|dequantize)|.*(nvjet|gemm|gemv|cutlass|cublas|splitk|xmma).*",
    ),
    ("copies", r"_(copy|gather)|.*(memcpy|memset|copy|index|gather|scatter|fill|cat|sort|scan|arange|elementwise).*"),
)
"""Name of a group → what its kernels are called, the template's arguments left off; the first that matches counts."""

_GAP_US = 20.0
"""Shorter pauses of the device are those between two kernels of a graph."""

Spans = Sequence[tuple[float, float]]


def group_of(kernel: str) -> str:
    """The group that a kernel belongs to by its name."""
    name = re.sub(r"<.*", "", kernel.removeprefix("void ")).strip()
    return next((group for group, pattern in GROUPS if re.fullmatch(pattern, name, re.IGNORECASE)), "other")


def busy_and_gaps_us(spans: Spans) -> tuple[float, float]:
    """How long at least one span lasts, and the sum of the long pauses between them."""
    busy, gaps, reached = 0.0, 0.0, None
    for start, end in sorted(spans):
        pause = 0.0 if reached is None else start - reached
        gaps += pause if pause > _GAP_US else 0.0
        busy += max(0.0, end - start if reached is None else end - max(start, reached))
        reached = end if reached is None else max(reached, end)
    return busy, gaps


def decode_case(fleet: Fleet, adapters: int, rows: int) -> Line:
    """A decode step of a steady batch."""
    names = fleet.adapters(RANK_16, min(adapters, rows))
    filled: list[str | None] = [names[row % len(names)] if names else None for row in range(rows)]
    timed, recorded = fleet.sizes.steps, max(2, fleet.sizes.steps // 3)
    fleet.fill(filled, fleet.sizes.prompt)
    for _ in range(8):
        fleet.step()
    line = _split(fleet.step, timed, recorded, on_gpu=fleet.on_gpu)
    fleet.clear()
    sizes: Line = {"adapters": adapters, "rows": rows, "context": fleet.sizes.prompt}
    return {"case": "profile", "what": "decode", **sizes, **line}


def prefill_case(fleet: Fleet, adapters: int, tokens: int) -> Line:
    """A step that is all prompts: one, or one for each adapter."""
    names = fleet.adapters(RANK_16, adapters)
    rows: list[str | None] = [*names] or [None]

    def step() -> None:
        for name in rows:
            fleet.add(name, fleet.prompt(tokens // len(rows)), 1)
        while fleet.live:
            fleet.step()

    for _ in range(3):
        step()
    timed, recorded = max(2, fleet.sizes.steps // 6), max(2, fleet.sizes.steps // 12)
    line = _split(step, timed, recorded, on_gpu=fleet.on_gpu)
    sizes: Line = {"adapters": adapters, "rows": len(rows), "tokens": tokens}
    return {"case": "profile", "what": "prefill", **sizes, **line}


def _split(step: Callable[[], object], timed: int, recorded: int, *, on_gpu: bool) -> Line:
    """A step's milliseconds without the profiler, then each group's part, and what the host's time goes into.

    On a CPU operations stand for kernels, so that the accounts can be checked there.
    """
    wall_ms = _milliseconds(step, timed, on_gpu)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as kernels_of:
        profiled_ms = _milliseconds(step, recorded, on_gpu)
    groups, kernels, counts = Counter[str](), Counter[str](), Counter[str]()
    spans: list[tuple[float, float]] = []
    for event in kernels_of.events() or []:
        if (event.device_type == DeviceType.CUDA) != on_gpu or event.is_user_annotation:
            continue
        microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        groups[group_of(event.name)] += microseconds
        kernels[event.name] += microseconds
        counts[event.name] += 1
        spans.append((event.time_range.start, event.time_range.end))
    busy_us, gaps_us = busy_and_gaps_us(spans)

    def ms(microseconds: float) -> float:
        return round(microseconds / 1e3 / recorded, 4)

    return {
        "step_ms": round(wall_ms, 3),
        "steps": timed,
        "profiled_ms": round(profiled_ms, 3),
        "busy_ms": ms(busy_us),
        "idle_ms": round(max(0.0, wall_ms - ms(busy_us)), 4),
        "gaps_ms": ms(gaps_us),
        "kernels": round(len(spans) / recorded, 1),
        "groups_ms": {name: ms(value) for name, value in groups.most_common()},
        "accounted": round(1 - groups["other"] / max(1.0, sum(groups.values())), 4),
        "longest": [
            {"kernel": name[:120], "group": group_of(name), "ms": ms(value), "calls": round(counts[name] / recorded, 1)}
            for name, value in kernels.most_common(20)
        ],
        "host_ms": _host_ms(step, recorded),
    }


def _host_ms(step: Callable[[], object], count: int) -> dict[str, float]:
    """The functions in which the host spends most of a step, waiting for the device too, by cProfile: somewhat slower
    than without it."""
    recorded = cProfile.Profile()
    recorded.runcall(lambda: [step() for _ in range(count)])
    stats: dict[Any, Any] = pstats.Stats(recorded).stats  # pyright: ignore[reportAttributeAccessIssue]
    longest = sorted(stats.items(), key=lambda item: -item[1][2])[:12]
    return {
        f"{re.sub(r'.*/', '', file)}:{line} {name}"[:100]: round(1e3 * own / count, 4)
        for (file, line, name), (_, _, own, _, _) in longest
    }


def _milliseconds(step: Callable[[], object], count: int, on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / count
