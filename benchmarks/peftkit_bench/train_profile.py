"""Where a training step's time goes: kernels of torch's profiler by what they do, and the time in which none runs."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_GROUPS = (
    ("attention", r"flash|fmha|attention|attn|sdpa|mem_eff|softmax_warp|cudnn::fusion|dot_do_o"),
    ("dequantise", r"dequant|nf4"),
    ("optimiser", r"optimizer|adam|multi_tensor|foreach|lpnorm|percentile|clip"),
    ("loss", r"softmax|nll|cross_entropy|logsumexp"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|wgmma|cublas|splitk|aten::(mm|addmm|bmm|baddbmm|matmul)$"),
    ("norm, rope, gate", r"norm|rsqrt|rotat|rope|silu|gelu|gate|swiglu|sigmoid|pow|mean|neg_|cos_|sin_"),
    (
        "copies",
        r"memcpy|memset|copy|catarray|index|gather|scatter|fill|embedding|arange|tril|triu|aten::(cat|zero_|select)",
    ),
    ("adds and products", r"elementwise|reduce|add|mul|div|sum|aten::"),
)
"""Name of a group → what its kernels' names have in them; the first that matches counts."""

Line = dict[str, Any]


def group_of(kernel: str) -> str:
    """The group that a kernel belongs to by its name."""
    return next((name for name, pattern in _GROUPS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def profile_step(step: Callable[[], object], device: torch.device) -> Line:
    """One call of `step`: its milliseconds without the profiler, each group's share, and the longest kernels.

    `idle` is the time in which no kernel or copy runs; groups on several streams at once may come to more than the
    step. On a CPU operations stand for kernels.
    """
    on_gpu = device.type == "cuda"
    wall_ms = _milliseconds(step, on_gpu)
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    step()
    with profile(activities=activities) as recorded:
        profiled_ms = _milliseconds(step, on_gpu)
    events = [
        event
        for event in recorded.events() or []
        if (event.device_type == DeviceType.CUDA) == on_gpu and not event.is_user_annotation
    ]
    groups, kernels, counts = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        groups[group_of(event.name)] += microseconds
        kernels[event.name] += microseconds
        counts[event.name] += 1
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    busy_us, length_us = _union(spans), max(end for _, end in spans) - min(start for start, _ in spans)
    groups["idle"] = max(length_us - busy_us, 0)
    return {
        "step_ms": round(wall_ms, 2),
        "profiled_ms": round(profiled_ms, 2),
        "span_ms": round(length_us / 1e3, 2),
        "kernels": len(events),
        "groups_ms": {name: round(value / 1e3, 3) for name, value in groups.most_common()},
        "accounted": round(1 - groups["other"] / length_us, 4),
        "longest": [
            {"kernel": name[:160], "group": group_of(name), "ms": round(value / 1e3, 3), "calls": counts[name]}
            for name, value in kernels.most_common(25)
        ],
    }


def _milliseconds(step: Callable[[], object], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the time that at least one span covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
