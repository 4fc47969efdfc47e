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

Kind = Literal["one", "few", "crowd", "some", "many", "steady"]


@dataclass(frozen=True, slots=True)
class Config:
    """How the two kernels are cut. Ranks above 16 are taken in steps of `…_ranks`, others in one of 16."""

    shrink_rows: int
    block_k: int
    """Features of a step of shrink."""
    splits: int
    """Most shares that the features are cut into."""
    shrink_ranks: int
    shrink_warps: int
    shrink_stages: int
    expand_rows: int
    block_n: int
    """Columns of a program of expand."""
    expand_ranks: int
    expand_warps: int
    expand_stages: int
    together: bool = False
    """Whether a program of shrink has all projections, so that their input is read once."""

    def steps(self, features: int) -> tuple[int, int]:
        """Steps of a share, and shares."""
        steps = triton.cdiv(features, self.block_k * self.splits)
        return steps, triton.cdiv(features, self.block_k * steps)


CONFIGS: Mapping[tuple[Kind, int], Config] = MappingProxyType(
    {
        ("one", 80): Config(16, 256, 16, 32, 4, 2, 8, 128, 32, 4, 2),
        ("few", 80): Config(16, 512, 8, 16, 4, 2, 8, 256, 32, 4, 2),
        ("crowd", 80): Config(16, 512, 16, 16, 4, 1, 8, 512, 16, 4, 1),
        ("some", 80): Config(32, 128, 4, 16, 4, 3, 32, 128, 32, 4, 2, together=True),
        ("many", 80): Config(64, 64, 4, 16, 4, 3, 64, 128, 32, 4, 2, together=True),
        ("steady", 80): Config(16, 256, 8, 16, 4, 3, 16, 256, 16, 4, 2),
        ("one", 90): Config(16, 256, 16, 64, 4, 2, 8, 128, 64, 4, 2),
        ("few", 90): Config(16, 512, 8, 16, 4, 2, 8, 256, 32, 4, 2),
        ("crowd", 90): Config(16, 512, 16, 16, 4, 1, 8, 512, 16, 4, 1),
        ("some", 90): Config(32, 128, 4, 32, 4, 3, 32, 256, 32, 4, 2, together=True),
        ("many", 90): Config(64, 64, 4, 32, 4, 4, 64, 256, 32, 8, 2, together=True),
        ("steady", 90): Config(16, 256, 8, 16, 4, 3, 16, 256, 16, 4, 2),
    }
)
"""(kind, compute capability) → cuts; another card takes the newest row before it. `kind_of` has the rule for sizes."""

_OVERRIDE: ContextVar[Config | None] = ContextVar("segmented config", default=None)


def kind_of(num_rows: int, num_segments: int, deterministic: bool) -> Kind:
    """The kind of a call, from shapes alone: a replayed graph has the cuts it was captured with."""
    if deterministic:
        return "steady"
    if num_rows > 256:
        return "some" if num_rows <= 1024 else "many"
    num_tiles = min(num_rows, num_rows // 16 + num_segments)
    return "one" if num_tiles <= 4 else "few" if num_tiles <= 24 else "crowd"


def cuts_of(kind: Kind, capability: int) -> Config:
    """The table's row for a card, 90 for compute capability 9.0."""
    return CONFIGS[kind, max((known for _, known in CONFIGS if known <= capability), default=80)]


def config(num_rows: int, num_segments: int, deterministic: bool, device: torch.device) -> Config:
    """The cuts for a call."""
    override = _OVERRIDE.get()
    if override is not None and not deterministic:
        return override
    return cuts_of(kind_of(num_rows, num_segments, deterministic), capability_of(device))


def candidates(kind: Kind) -> Iterator[Config]:
    """Cuts worth timing: those of shrink beside the table's expand, then those of expand beside the table's shrink."""
    base = cuts_of(kind, 90)
    rows = (16, 32, 64, 128) if base.together else (16,)
    for m, k, splits, ranks, warps, stages in product(
        rows, (64, 128, 256, 512, 1024), (1, 2, 4, 8, 16), (16, 32, 64), (2, 4, 8), (1, 2, 3, 4)
    ):
        wide = ranks * (4 if base.together else 1)
        if (m + wide) * k * 2 * stages <= 200_000 and m * wide <= 128 * 32 * warps:
            yield replace(
                base, shrink_rows=m, block_k=k, splits=splits, shrink_ranks=ranks, shrink_warps=warps,
                shrink_stages=stages,
            )  # fmt: skip
    rows = (16, 32, 64) if base.together else (8, 16)
    for m, n, ranks, warps, stages in product(rows, (64, 128, 256, 512), (16, 32, 64), (2, 4, 8), (1, 2, 3)):
        if m * n <= 2048 * warps and ranks * n * stages * 2 <= 200_000:
            yield replace(
                base, expand_rows=m, block_n=n, expand_ranks=ranks, expand_warps=warps, expand_stages=stages
            )  # fmt: skip


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
def locate(start, tile, num_rows, num_segments, BLOCK_M: tl.constexpr):
    """A tile's segment, first entry of `row_X` and number of rows, which is 0 or less where there is none."""
    segment = tile  # what the search comes to where every start[g] is below BLOCK_M
    if num_rows >= BLOCK_M:
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
    inner, count, rank, r0, row_stride, share_stride,
    SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """What shrink left of `count` rows from `inner` on, (BLOCK_R, BLOCK_M) from rank r0 on, its shares added.

    Zeros stand behind the true rank up to a multiple of 16, so that loads are of 16 bytes.
    """
    m, r = tl.arange(0, BLOCK_M), r0 + tl.arange(0, BLOCK_R)
    share = tl.arange(0, PADDED)
    at = share[:, None, None] * share_stride + r[None, :, None] + (m * row_stride)[None, None, :]
    mask = (share < SHARES)[:, None, None] & (r // 16 < tl.cdiv(rank, 16))[None, :, None] & (m < count)[None, None, :]
    return tl.sum(tl.load(inner + at, mask=mask, other=0.0), axis=0)
