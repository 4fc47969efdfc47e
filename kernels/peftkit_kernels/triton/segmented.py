"""What the two operations on rows sorted by adapter share: their cuts, the way from a program to its rows, and sums.

Each is two launches: `shrink` takes a row's features to its adapter's rank, `expand` takes them from there to the
columns. Shrink cuts the features into shares and leaves each share's sums in float32 memory; expand adds the shares in
their order. A program finds its rows without a table of tiles: with tiles of M rows, segment g has the numbers from
start[g] // M + g on, which never overlap, so X // M + G programs cover every table of that shape; tiles of one row
are numbered by the row, whose slot a table has.
"""
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal

import torch
import triton
import triton.language as tl

from peftkit_kernels.triton.counts import cdiv
from peftkit_kernels.triton.device import capability_of

Kind = Literal[
    "one", "each", "mixed", "group", "few", "wide", "crowd", "some", "many", "walk", "long", "deep", "steady"
]
Operation = Literal["lora", "bottleneck"]


@dataclass(frozen=True, slots=True)
class Config:
    """How the two kernels are cut. Ranks above 16 are taken in steps of `…_ranks`, others in one of 16.

    Tiles of one row are summed up without tensor cores, straight from registers.
    """

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
    blocks: int = 0
    """Most blocks of columns that a program of a LoRA's expand walks over; 0 for a program a block."""
    sends: bool = False
    """Whether a walk sends for its first blocks of y and B before shrink has ended."""
    together: bool = False
    """Whether a program of shrink has all projections, so that their input is read once."""

    def steps(self, features: int) -> tuple[int, int]:
        """Steps of a share, and shares."""
        steps = cdiv(features, self.block_k * self.splits)
        return steps, cdiv(features, self.block_k * steps)


CONFIGS: Mapping[tuple[Kind, int], Config] = MappingProxyType(
    {
        ("one", 80): Config(1, 256, 16, 32, 4, 1, 1, 256, 32, 4, 1),
        ("each", 80): Config(1, 512, 8, 16, 4, 1, 1, 512, 16, 4, 1),
        ("mixed", 80): Config(1, 512, 8, 16, 4, 1, 1, 512, 16, 4, 1),
        ("group", 80): Config(16, 256, 16, 32, 4, 2, 8, 128, 32, 4, 2),
        ("few", 80): Config(16, 512, 8, 16, 4, 2, 8, 256, 32, 4, 2),
        ("wide", 80): Config(16, 512, 8, 16, 4, 2, 8, 256, 32, 4, 2),
        ("crowd", 80): Config(16, 512, 16, 16, 4, 1, 8, 512, 16, 4, 1),
        ("some", 80): Config(32, 128, 4, 16, 4, 3, 32, 128, 32, 4, 2, together=True),
        ("many", 80): Config(64, 64, 4, 16, 4, 3, 64, 128, 32, 4, 2, together=True),
        ("walk", 80): Config(32, 128, 4, 16, 4, 3, 32, 128, 32, 4, 2, together=True),
        ("long", 80): Config(64, 64, 4, 16, 4, 3, 64, 128, 32, 4, 2, together=True),
        ("deep", 80): Config(64, 64, 4, 16, 4, 3, 64, 128, 32, 4, 2, together=True),
        ("steady", 80): Config(16, 256, 8, 16, 4, 3, 16, 256, 16, 4, 2),
        ("one", 90): Config(1, 256, 16, 64, 4, 1, 1, 64, 64, 4, 1),
        ("each", 90): Config(1, 512, 8, 16, 4, 1, 1, 512, 16, 2, 1),
        ("mixed", 90): Config(1, 2048, 2, 16, 4, 1, 1, 512, 16, 2, 1),
        ("group", 90): Config(16, 256, 16, 64, 4, 2, 8, 256, 32, 8, 1),
        ("few", 90): Config(16, 512, 8, 16, 4, 2, 8, 256, 32, 4, 2),
        ("wide", 90): Config(16, 512, 8, 16, 4, 2, 16, 128, 32, 4, 3, blocks=4, sends=True),
        ("crowd", 90): Config(16, 128, 8, 16, 2, 1, 8, 512, 16, 4, 1),
        ("some", 90): Config(32, 128, 4, 16, 4, 3, 32, 128, 16, 4, 1, together=True),
        ("many", 90): Config(64, 64, 4, 16, 4, 4, 32, 128, 16, 4, 1, together=True),
        ("walk", 90): Config(32, 128, 4, 16, 4, 3, 32, 128, 32, 4, 3, together=True, blocks=4, sends=True),
        ("long", 90): Config(32, 128, 4, 16, 4, 4, 32, 128, 32, 4, 3, together=True, blocks=16),
        ("deep", 90): Config(64, 128, 8, 16, 4, 3, 32, 128, 32, 4, 3, together=True, blocks=16),
        ("steady", 90): Config(16, 256, 8, 16, 4, 3, 16, 256, 16, 4, 2),
    }
)
"""(kind, compute capability) → cuts; another card takes the newest row before it. `kind_of` has the rule for sizes."""

BESIDE: Mapping[Kind, Config] = MappingProxyType(
    {
        "each": Config(1, 512, 8, 16, 4, 1, 1, 512, 16, 2, 1),
        "group": Config(16, 256, 8, 16, 4, 1, 8, 128, 32, 4, 1),
        "few": Config(16, 256, 8, 16, 4, 1, 8, 256, 32, 4, 2),
        "wide": Config(16, 256, 8, 16, 4, 1, 16, 128, 32, 4, 3, blocks=4, sends=True),
        "crowd": Config(16, 128, 8, 16, 2, 1, 8, 512, 16, 4, 1),
    }
)
"""Kind → cuts of a LoRA whose kernels run, or wait, beside the product, from compute capability 9.0 on: within the
16 Ki registers and 27 KiB of shared memory that its programs leave of a multiprocessor."""

_ROWS = ((16, 256, 16, 64, 4, 2), (16, 512, 8, 16, 4, 2), (16, 64, 4, 16, 2, 4), (16, 128, 8, 16, 2, 1))
_COLUMNS = ((8, 256, 32, 8, 1), (8, 256, 32, 4, 2), (8, 512, 16, 4, 1), (8, 128, 16, 4, 1), (16, 256, 16, 4, 1))
_SHARES = (
    (32, 128, 4, 16, 4, 3),
    (32, 128, 4, 16, 4, 4),
    (32, 128, 8, 16, 4, 3),
    (64, 64, 4, 16, 4, 4),
    (64, 128, 8, 16, 4, 3),
)
_TILES = ((16, 256, 16, 4, 1), (32, 128, 16, 4, 1), (32, 256, 16, 8, 1), (64, 64, 16, 4, 1), (64, 128, 16, 8, 1))
_WALKS = ((32, 128, 32, 4, 3, 4), (32, 128, 32, 4, 3, 16), (64, 128, 32, 4, 3, 16), (64, 64, 32, 4, 3, 16))
_WORTH_TIMING: Mapping[Kind, tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]] = MappingProxyType(
    {
        "one": (
            ((1, 128, 32, 64, 4, 1), (1, 256, 16, 64, 4, 1), (1, 256, 16, 16, 2, 1), (1, 512, 8, 32, 4, 1), _ROWS[0]),
            ((1, 128, 64, 4, 1), (1, 256, 64, 4, 1), (1, 256, 16, 2, 1), (1, 512, 16, 4, 1), _COLUMNS[0]),
        ),
        "each": (
            ((1, 512, 8, 16, 4, 1), (1, 512, 4, 16, 4, 1), (1, 512, 8, 16, 2, 1), (1, 1024, 4, 16, 4, 1), _ROWS[2]),
            ((1, 512, 16, 4, 1), (1, 512, 16, 2, 1), (1, 1024, 16, 4, 1), (1, 256, 64, 4, 1), _COLUMNS[2]),
        ),
        "mixed": (
            ((1, 512, 8, 16, 4, 1), (1, 1024, 4, 16, 4, 1), (1, 1024, 2, 16, 4, 1), (1, 2048, 2, 16, 4, 1), _ROWS[1]),
            ((1, 512, 16, 2, 1), (1, 1024, 16, 4, 1), (1, 2048, 16, 4, 1), *_COLUMNS[2:3], _COLUMNS[-1]),
        ),
        "group": (_ROWS, _COLUMNS),
        "few": (_ROWS, _COLUMNS),
        "wide": (_ROWS, (*_COLUMNS, (16, 128, 32, 4, 3, 2), (16, 128, 32, 4, 3, 4), (16, 128, 32, 4, 3, 8))),
        "crowd": (_ROWS, _COLUMNS),
        "some": (_SHARES, _TILES),
        "many": (_SHARES, _TILES),
        "walk": (_SHARES, _WALKS),
        "long": (_SHARES, _WALKS),
        "deep": (_SHARES, _WALKS),
        "steady": (_ROWS, _COLUMNS[-1:]),
    }
)
"""Cuts of shrink, then of expand, in the order of Config's fields."""

_OVERRIDE: ContextVar[Config | None] = ContextVar("segmented config", default=None)


def tiles_of(num_rows: int, num_segments: int, rows: int) -> int:
    """Programs that cover every table of that shape with tiles of so many rows."""
    return num_rows if rows == 1 else num_rows // rows + num_segments


def kind_of(
    operation: Operation,
    num_rows: int,
    num_segments: int,
    deterministic: bool = False,
    columns: float = 1.0,
) -> Kind:
    """The kind of a call, from shapes alone: a replayed graph has the cuts it was captured with. Tiles have
    one row where there are at most two rows a segment, but for a LoRA of up to four rows.

    columns: of y, for each feature of x.
    """
    if deterministic:
        return "steady"
    lora = operation == "lora"
    if 4 < num_rows <= 2 * num_segments and (lora or num_rows <= 256):
        return "each" if num_rows <= 256 else "mixed"
    if num_rows > 256:
        if not lora:
            return "some" if num_rows <= 1024 else "many"
        if num_rows <= 1024:
            return "wide" if columns >= 4 and num_rows <= 16 * num_segments else "walk"
        return "long" if columns > 0.5 else "deep"
    if not lora:
        return "one" if num_rows <= num_segments else "group"
    num_tiles = min(num_rows, num_rows // 16 + num_segments)
    if num_tiles <= 4:  # a single row too, which is quicker with tensor cores
        return "group"
    return "crowd" if num_tiles > 24 else "few" if columns < 4 else "wide"


def cuts_of(kind: Kind, capability: int) -> Config:
    """The table's row for a card, 90 for compute capability 9.0."""
    return CONFIGS[kind, max((known for _, known in CONFIGS if known <= capability), default=80)]


def config(kind: Kind, device: torch.device, *, beside: bool = False) -> Config:
    """The cuts for a call of this kind; beside a product those of `BESIDE`."""
    override = _OVERRIDE.get()
    if override is not None and kind != "steady":
        return override
    return BESIDE[kind] if beside else cuts_of(kind, capability_of(device, 80))


def candidates(kind: Kind) -> Iterator[Config]:
    """Cuts worth timing: each of shrink beside each of expand."""
    table = cuts_of(kind, 90)
    for shrink, expand in product(*_WORTH_TIMING[kind]):
        yield Config(*shrink, *expand, sends=table.sends, together=table.together)


@contextmanager
def override(cuts: Config) -> Iterator[None]:
    """Takes these cuts for every call inside, but for deterministic ones."""
    token = _OVERRIDE.set(cuts)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


@triton.jit
def locate(start, slot, row_slot, tile, num_rows, num_segments, BLOCK_M: tl.constexpr):
    """A tile's slot, first entry of `row_X` and number of rows, which is 0 or less where there is none."""
    if BLOCK_M == 1:
        mine, first = tl.load(row_slot + tile), tile
        count = (mine >= 0).to(tl.int32)
        mine = tl.maximum(mine, 0)
    else:
        segment = tl.where(num_segments == 1, 0, tile)  # the tile where every start[g] is below BLOCK_M
        if (num_rows >= BLOCK_M) & (num_segments > 1):
            segment = -1
            for g0 in range(0, num_segments, 128):
                g = g0 + tl.arange(0, 128)
                inside = g < num_segments
                begin = tl.load(start + g, mask=inside, other=0)
                segment += tl.sum((inside & (begin // BLOCK_M + g <= tile)).to(tl.int32), axis=0)
        begin = tl.load(start + segment)
        end = tl.load(start + segment + 1)
        first = begin + (tile - begin // BLOCK_M - segment) * BLOCK_M
        mine, count = tl.load(slot + segment), tl.minimum(end - first, BLOCK_M)
    return mine, first, count


@triton.jit
def projection_of(number, span, OUT: tl.constexpr, PROJECTIONS: tl.constexpr):
    """Of a program's number among spans of columns: its projection, that one's first column in y and number of columns,
    and the number within it."""
    p, column, out = 0, 0, OUT[0]
    for q in tl.static_range(1, PROJECTIONS):
        numbers = tl.cdiv(OUT[q - 1], span)
        behind = (number >= numbers) & (p == q - 1)
        number = tl.where(behind, number - numbers, number)
        column = tl.where(behind, column + OUT[q - 1], column)
        out = tl.where(behind, OUT[q], out)
        p = tl.where(behind, q, p)
    return p, column, out, number


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


@triton.jit
def add_expanded(acc_NM, b_RN, h_RM, BLOCK_M: tl.constexpr):
    """acc + bᵀ h; without tensor cores for a single row, of which they would take 8."""
    if BLOCK_M == 1:
        acc_NM += tl.sum(b_RN.to(tl.float32) * h_RM, axis=0)[:, None]
    else:
        acc_NM = tl.dot(b_RN.T, h_RM.to(b_RN.dtype), acc_NM, input_precision="ieee")
    return acc_NM


@triton.jit
def add_shrunk(acc_MN, x_MK, a_NK, BLOCK_M: tl.constexpr):
    """acc + x aᵀ; without tensor cores for a single row, of which they would take 16."""
    if BLOCK_M == 1:
        acc_MN += tl.sum(x_MK.to(tl.float32) * a_NK.to(tl.float32), axis=1)[None, :]
    else:
        acc_MN = tl.dot(x_MK, a_NK.T, acc_MN, input_precision="ieee")
    return acc_MN
