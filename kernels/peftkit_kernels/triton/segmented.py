"""What the two operations on rows sorted by adapter share: their cuts, the way from a program to its rows, and sums.

Each is two launches: `shrink` takes a row's features to its adapter's rank, `expand` takes them from there to the
columns. Shrink cuts the features into shares and leaves each share's sums in float32 memory; expand adds the shares in
their order. A program finds its rows without a table of tiles: with tiles of M rows, segment g has the numbers from
start[g] // M + g on, which never overlap, so X // M + G programs cover every table of that shape.
"""
# pyright: reportMissingParameterType=false, reportOperatorIssue=false

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Literal

import torch
import triton
import triton.language as tl

Kind = Literal["one", "few", "many", "steady"]


@dataclass(frozen=True, slots=True)
class Config:
    """How the two kernels are cut."""

    block_m: int
    """Rows of a tile."""
    block_k: int
    """Features of a step of shrink."""
    splits: int
    """Most shares that the features are cut into."""
    block_n: int
    """Columns of a program of expand."""
    shrink_ranks: int
    """Ranks of a step of shrink, for ranks above 16; else 16."""
    expand_ranks: int
    """The same of expand."""
    together: bool
    """Whether a program of shrink has all projections, so that their input is read once."""
    shrink_warps: int
    shrink_stages: int
    expand_warps: int
    expand_stages: int

    def steps(self, features: int) -> tuple[int, int]:
        """Steps of a share, and shares."""
        steps = triton.cdiv(features, self.block_k * self.splits)
        return steps, triton.cdiv(features, self.block_k * steps)


_ONE = Config(16, 256, 16, 128, 32, 64, False, 4, 2, 4, 2)
_FEW = Config(16, 512, 8, 512, 32, 32, False, 4, 3, 4, 2)
_MANY = Config(64, 64, 2, 128, 32, 64, True, 4, 4, 4, 2)
_STEADY = Config(16, 256, 8, 256, 16, 16, False, 4, 3, 4, 2)

CONFIGS: Mapping[tuple[Kind, int], Config] = MappingProxyType(
    {
        ("one", 80): _ONE,
        ("few", 80): replace(_FEW, shrink_stages=2),
        ("many", 80): replace(_MANY, shrink_stages=3),
        ("steady", 80): _STEADY,
        ("one", 90): _ONE,
        ("few", 90): _FEW,
        ("many", 90): _MANY,
        ("steady", 90): _STEADY,
    }
)
"""(kind, compute capability) → cuts; another card takes the newest row before it. `kind_of` has the rule for sizes."""

_OVERRIDE: ContextVar[Config | None] = ContextVar("segmented config", default=None)


def kind_of(num_rows: int, deterministic: bool) -> Kind:
    """The kind of a call, from shapes alone: a replayed graph has the cuts it was captured with."""
    if deterministic:
        return "steady"
    return "one" if num_rows <= 8 else "few" if num_rows <= 256 else "many"


def config(num_rows: int, deterministic: bool, device: torch.device) -> Config:
    """The cuts for a call."""
    override = _OVERRIDE.get()
    if override is not None and not deterministic:
        return override
    capability = capability_of(device)
    newest = max((known for _, known in CONFIGS if known <= capability), default=80)
    return CONFIGS[kind_of(num_rows, deterministic), newest]


def candidates(kind: Kind) -> Iterator[Config]:
    """Cuts worth timing."""
    base = CONFIGS[kind, 90]
    rows = (32, 64, 128) if kind == "many" else (16,)
    shares = (1, 2, 4) if kind == "many" else (4, 8, 16)
    for m, k, splits, n, ranks in product(rows, (64, 128, 256, 512), shares, (128, 256, 512), (32, 64)):
        for warps, stages in product((2, 4, 8), (2, 3, 4)):
            if m * n <= 128 * 256 and (m + 64) * k * stages <= 100_000:
                cut = replace(base, block_m=m, block_k=k, splits=splits, block_n=n, expand_ranks=ranks)
                yield replace(cut, shrink_warps=warps, shrink_stages=stages, expand_warps=warps)


@contextmanager
def override(cuts: Config) -> Iterator[None]:
    """Takes these cuts for every call inside, but for deterministic ones."""
    token = _OVERRIDE.set(cuts)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def capability_of(device: torch.device) -> int:
    """Compute capability, 90 for 9.0; 80 in the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit
def locate(start, tile, num_segments, BLOCK_M: tl.constexpr):
    """A tile's segment, first entry of `row_X` and number of rows, which is 0 or less where there is none."""
    segment = -1
    for g0 in range(0, num_segments, 128):
        g = g0 + tl.arange(0, 128)
        inside = g < num_segments
        begin = tl.load(start + g, mask=inside, other=0)
        segment += tl.sum((inside & (begin // BLOCK_M + g <= tile)).to(tl.int32), axis=0)
    begin = tl.load(start + segment)
    end = tl.load(start + segment + 1)
    first = begin + (tile - begin // BLOCK_M - segment) * BLOCK_M
    return segment, first, tl.minimum(end - first, BLOCK_M)


@triton.jit
def add_shares(
    inner, first, count, rank, r0, row_stride, share_stride,
    SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rows first to first + count of what shrink left, (BLOCK_M, BLOCK_R) from rank r0 on, its shares added."""
    m, r = tl.arange(0, BLOCK_M), r0 + tl.arange(0, BLOCK_R)
    share = tl.arange(0, PADDED)
    at = share[:, None, None].to(tl.int64) * share_stride + (first + m)[None, :, None].to(tl.int64) * row_stride
    mask = (share < SHARES)[:, None, None] & (m < count)[None, :, None] & (r < rank)[None, None, :]
    return tl.sum(tl.load(inner + at + r[None, None, :], mask=mask, other=0.0), axis=0)
