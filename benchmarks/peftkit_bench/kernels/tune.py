"""Times the configurations that a kernel's module proposes, and says which are quickest for each case."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from peftkit_bench.kernels import ahead
from peftkit_bench.kernels.case import Case
from peftkit_bench.timing import time_calls

_REPEATS = 5
_SHOWN = 5

Line = dict[str, Any]


def tune(cases: Sequence[Case], seed: int, most: int) -> Iterator[Line]:
    """One line for each case of a kernel that has candidates: the default's time, and the best of at most `most`."""
    with ahead.pool() as workers:
        for case in cases:
            if case.tuned is None:
                continue
            count = len(ahead.candidates(case)[0])
            picks = sorted(random.Random(seed).sample(range(count), min(most, count)))
            ahead.compile_candidates(workers, case, picks)
            torch.manual_seed(seed)
            yield _best(case, picks)
            torch.cuda.empty_cache()


def _best(case: Case, picks: Sequence[int]) -> Line:
    work, (configs, override) = case.prepare(), ahead.candidates(case)
    default = time_calls(work.ours, floor_us=case.floor.us, repeats=_REPEATS).median_us
    times: list[tuple[float, str]] = []
    for pick in picks:
        try:
            with override(configs[pick]):
                us = time_calls(work.ours, floor_us=case.floor.us, repeats=_REPEATS).median_us
        except ahead.FAULTS:  # more shared memory than there is, or a tile that doesn't fit the shape
            continue
        times.append((us, repr(configs[pick])))
    times.sort()
    return {
        "tune": case.name,
        "module": case.tuned,
        "floor_us": round(case.floor.us, 3),
        "default_us": round(default, 3),
        "tried": len(picks),
        "failed": len(picks) - len(times),
        "best": [{"us": round(us, 3), "config": config} for us, config in times[:_SHOWN]],
    }
