"""Cases of the product with bfloat16 weights for few rows, beside cuBLAS."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import peftkit_kernels as ops
from peftkit_bench.kernels.case import Case, Floor, Goal, Work, num_sets

_VOCABULARY = 128256
_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (_VOCABULARY, 4096), (2048, 1536), (17920, 1536))
"""Out and in features: 8B's q k v, o, gate and up, down and head; 1.5B's q k v, gate and up."""
_ROWS = (1, 8, 16, 32, 64)
_QUICK = ((4096, 4096), (28672, 4096))


def cases() -> Iterator[Case]:
    """By shape and rows."""
    for out, in_features in _SHAPES:
        for rows in _ROWS:
            moved = 2 * (out * in_features + rows * (out + in_features))
            floor = Floor(moved, 2 * rows * out * in_features)
            sizes = {"rows": rows, "out": out, "in": in_features}
            quick = (out, in_features) in _QUICK and rows in (1, 8, 32)
            ours = rows <= 32 or out == _VOCABULARY  # the others are cuBLAS itself
            goal = Goal("ahead of cuBLAS", beats=("cublas",)) if ours else None
            prepare = partial(_prepare, rows, out, in_features)
            yield Case("linear", sizes, floor, goal, prepare, ("linear", str(rows)) if ours else None, quick)


def _prepare(rows: int, out: int, in_features: int) -> Work:
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    sets = num_sets(2 * out * in_features)
    weights = [torch.randn(out, in_features, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    ours, theirs = ([partial(run, x, weight) for weight in weights] for run in (ops.linear, F.linear))
    return Work(ours, {"cublas": lambda: theirs})
