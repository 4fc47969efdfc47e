"""Times on a GPU: many launches in one CUDA graph, over inputs that together are larger than L2."""

import math
import shutil
import statistics
import subprocess
import timeit
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPEATS = 7
_GRAPH_US = 2000.0
"""Least length of a timed graph: events resolve half a microsecond."""
_MAX_LAUNCHES = 512
_LONG_US = 5000.0
"""Beside a call of this length launches cost nothing: it is timed outside a graph, where it may wait for the device."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One call's time, of repeated replays."""

    median_us: float
    min_us: float
    max_us: float
    repeats: int
    launches: int
    """Calls in the graph."""


def time_calls(calls: Sequence[Call], *, floor_us: float, repeats: int = REPEATS) -> Timing:
    """Times one of `calls`, which do the same work on different memory, by replays of a graph of all of them; a
    long one by itself.

    floor_us: what a call takes at least, for the length of the graph. Nothing is compiled or allocated while timing.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    if floor_us > _LONG_US:
        times = sorted(_event_us(calls[i % len(calls)]) for i in range(repeats))
        return Timing(statistics.median(times), times[0], times[-1], repeats, 1)
    rounds = math.ceil(_GRAPH_US / (len(calls) * max(floor_us, 2.0)))
    rounds = max(1, min(rounds, _MAX_LAUNCHES // len(calls)))
    graph = torch.cuda.CUDAGraph()
    results: deque[object] = deque(maxlen=len(calls))  # kept, so that outputs lie in different memory too
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                results.append(call())
    graph.replay()
    launches = rounds * len(calls)
    times = sorted(_event_us(graph.replay) / launches for _ in range(repeats))
    return Timing(statistics.median(times), times[0], times[-1], repeats, launches)


def _event_us(work: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


@dataclass(frozen=True)
class Ceilings:
    """What the card does at best, measured on random data."""

    copy_tbs: float
    """Bytes read plus bytes written."""
    read_tbs: float
    bf16_tflops: float


def measure_ceilings() -> Ceilings:
    """A device copy, a sum over 2 GiB and an 8192 × 8192 × 8192 product; medians of 7."""
    copy_us, read_us, num_bytes = _stream()
    product = product_tflops(torch.device("cuda"), torch.bfloat16, 8192)
    return Ceilings(2 * num_bytes / copy_us / 1e6, num_bytes / read_us / 1e6, product)


def product_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Rate of a dense product of two `size` × `size` matrices; a median of 7."""
    x, w = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    if device.type == "cuda":
        return 2 * size**3 / _median(lambda: x @ w) / 1e6
    return 2 * size**3 / statistics.median(timeit.repeat(lambda: x @ w, number=1, repeat=REPEATS)) / 1e12


def _stream() -> tuple[float, float, int]:
    """Times of a copy and of a read, and the bytes of the tensor."""
    from peftkit_bench.read import read_all

    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target, words = torch.empty_like(source), source.view(torch.int32)
    return _median(lambda: target.copy_(source)), _median(lambda: read_all(words)), source.nbytes


def _median(work: Call) -> float:
    for _ in range(3):
        work()
    return statistics.median(_event_us(work) for _ in range(REPEATS))


def card() -> dict[str, Any]:
    """The card, its driver and its clocks as they are now."""
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
    }
    program = shutil.which("nvidia-smi")
    if program is None:
        return facts
    fields = ("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = [program, "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        facts |= zip(fields, (value.strip() for value in found.stdout.split(",")), strict=True)
    return facts
