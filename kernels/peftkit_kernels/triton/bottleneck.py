"""Grouped bottleneck adapters: the product with `down`, then φ and `up` onto y.

Bound by memory: both matrices of the distinct adapters at few rows, y at many. y is read by `_down` and written by
`_up`, which waits for all of `_down`; a row's mean and variance are taken by each program of `_down` that needs them.
Where each row is a tile of its own, a program of `_down_rows` has whole rows of `down`, so that sums of a row are
complete; otherwise one of `_down` has a share of the features of a tile.
"""
# pyright: reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peftkit_kernels.segments import max_width
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.dependent import begins_early, launch_options, wait_turn
from peftkit_kernels.triton.device import capability_of
from peftkit_kernels.triton.segmented import (
    CONFIGS,
    Config,
    Kind,
    add_expanded,
    add_shares,
    add_shrunk,
    cuts_of,
    kind_of,
    locate,
    tiles_of,
)
from peftkit_kernels.triton.segmented import candidates as _tiles_worth_timing
from peftkit_kernels.triton.segmented import config as _config
from peftkit_kernels.triton.segmented import override as _override_tiles

__all__ = ["CONFIGS", "ROWS", "Rows", "candidates", "grouped_bottleneck", "override", "specimens"]


@dataclass(frozen=True, slots=True)
class Rows:
    """How the two launches are cut for tiles of one row."""

    outs: int
    """Rows of `down` that a program has at a time: 1, 2, 4, 8 or 16."""
    block_k: int
    """Features of a step."""
    down_warps: int
    down_stages: int
    block_n: int
    """Columns of a program of `up`."""
    ranks: int
    """Of a step of `up`."""
    up_warps: int

    @property
    def programs(self) -> int:
        """Of `down` for a row: a width of 64 is dealt out at once."""
        return 64 // self.outs


ROWS: Mapping[int, Rows] = MappingProxyType(
    {4: Rows(1, 4096, 4, 1, 64, 64, 2), 32: Rows(2, 2048, 4, 1, 64, 64, 2), 256: Rows(8, 512, 4, 4, 512, 16, 2)}
)
"""Most rows → cuts."""

_OVERRIDE: ContextVar[Rows | None] = ContextVar("bottleneck rows", default=None)
_DOWN = ((1, 4096, 4, 1), (2, 4096, 4, 1), (2, 2048, 4, 1), (4, 2048, 4, 2), (8, 512, 4, 4), (8, 1024, 8, 3))
_UP = ((64, 64, 2), (32, 64, 4), (128, 64, 4), (256, 16, 1), (512, 16, 2), (1024, 16, 4))


def candidates(kind: Kind) -> Iterator[Config | Rows]:
    """Cuts worth timing."""
    if kind in ("one", "each"):
        yield from (Rows(*down, *up) for down, up in product(_DOWN, _UP))
    else:
        yield from _tiles_worth_timing(kind)


@contextmanager
def override(cuts: Config | Rows) -> Iterator[None]:
    """Takes these cuts for every call inside, but for deterministic ones; `Rows` for those with tiles of one row."""
    if isinstance(cuts, Config):
        with _override_tiles(cuts):
            yield
        return
    token = _OVERRIDE.set(cuts)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def grouped_bottleneck(
    y_TH: Tensor,
    residual_TH: Tensor,
    weights: Tensor,
    row_X: Tensor,
    segment_start_G1: Tensor,
    segment_slot_G: Tensor,
    row_slot_X: Tensor,
    offset_S: Tensor,
    width_S: Tensor,
    scale_S: Tensor,
    form_S3: Tensor,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See `peftkit_kernels.grouped.grouped_bottleneck`; widths up to `max_width(H)`."""
    num_rows, num_segments, hidden = row_X.shape[0], segment_slot_G.shape[0], y_TH.shape[1]
    if not num_rows or not num_segments:
        return y_TH
    assert y_TH.stride(1) == 1 and residual_TH.stride(1) == 1, "rows of y and residual are contiguous"
    tables = (offset_S, width_S, scale_S, form_S3)
    assert all(table.is_contiguous() for table in tables), "tables are contiguous"
    cuts = _cuts(num_rows, num_segments, deterministic, y_TH.device)
    shares = 1 if isinstance(cuts, Rows) else cuts.steps(hidden)[1]
    room = max_width(hidden)
    inner = torch.empty((shares, num_rows, room), dtype=torch.float32, device=y_TH.device)
    rows = (row_X, segment_start_G1, segment_slot_G, row_slot_X)
    pdl = capability_of(y_TH.device, 80) >= 90
    early = begins_early(y_TH.device, max(num_rows, y_TH.shape[0])) and not deterministic
    sizes = (num_rows, num_segments, hidden, room)
    given = (y_TH, residual_TH, weights, *rows, offset_S, width_S, form_S3, inner, *sizes, y_TH.stride(0))
    # early or not at all: `_up` reads y before it waits for this launch, and then what wrote y must have ended
    if isinstance(cuts, Rows):
        tiles, warps, stages = num_rows, cuts.up_warps, 1
        _down_rows[(num_rows, cuts.programs)](
            *given, residual_TH.stride(0), **_rows_constants(cuts, pdl, early), num_warps=cuts.down_warps,
            **launch_options(early),
        )  # fmt: skip
    else:
        tiles = tiles_of(num_rows, num_segments, cuts.expand_rows)
        warps, stages = cuts.expand_warps, cuts.expand_stages
        _down[(tiles_of(num_rows, num_segments, cuts.shrink_rows), shares)](
            *given, residual_TH.stride(0), **_down_constants(cuts, hidden, pdl, early), num_warps=cuts.shrink_warps,
            num_stages=cuts.shrink_stages, **launch_options(early),
        )  # fmt: skip
    _up[(tiles, cdiv(hidden, cuts.block_n))](
        y_TH, weights, *rows, *tables, inner, *sizes, y_TH.stride(0), **_up_constants(cuts, shares, pdl, early),
        num_warps=warps, num_stages=stages, **launch_options(pdl),
    )  # fmt: skip
    return y_TH


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _down(
    y, residual, weights, row, start, slot, row_slot, offset, width, form, inner, num_rows, num_segments, hidden, room,
    y_stride, residual_stride, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One share of the features of one tile: inner (SHARES, X, room)."""
    if EARLY:
        wait_turn()
    elif PDL:
        gdc_launch_dependents()
    s, first, count = locate(start, slot, row_slot, tl.program_id(0), num_rows, num_segments, BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    rows = tl.load(row + first + m, mask=live, other=0)
    b, at = tl.load(width + s), tl.load(offset + s)
    source, normed = tl.load(form + 3 * s), tl.load(form + 3 * s + 2)
    if (count <= 0) | (b == 0):  # behind the loads, so that none waits for another
        return
    y += rows[:, None] * y_stride
    residual += rows[:, None] * residual_stride
    live_y = (m < tl.where(source != 2, count, 0))[:, None]
    live_residual = (m < tl.where(source != 0, count, 0))[:, None]
    mean, inverse = tl.zeros((BLOCK_M,), tl.float32), tl.full((BLOCK_M,), 1.0, tl.float32)
    if normed != 0:
        mean, inverse = _moments(y, residual, live_y, live_residual, hidden, BLOCK_M, BLOCK_K)
    share = tl.program_id(1)
    into = inner + (share * num_rows + first).to(tl.int64) * room + m[:, None] * room
    k0 = share * (STEPS * BLOCK_K)
    if at % 8 == 0:
        _product(
            y, residual, weights + at // 8 * 8, into, live, live_y, live_residual, mean, inverse, normed, b, k0,
            hidden, STEPS, BLOCK_M, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    else:
        _product(
            y, residual, weights + at, into, live, live_y, live_residual, mean, inverse, normed, b, k0, hidden,
            STEPS * BLOCK_K // 16, BLOCK_M, 16, 16,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _down_rows(
    y, residual, weights, row, start, slot, row_slot, offset, width, form, inner, num_rows, num_segments, hidden, room,
    y_stride, residual_stride, OUTS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """For one row the products with OUTS rows of `down`, and with every so many-th OUTS behind: inner (1, X, room)."""
    if EARLY:
        wait_turn()
    elif PDL:
        gdc_launch_dependents()
    s, first, count = locate(start, slot, row_slot, tl.program_id(0), num_rows, num_segments, 1)
    x_row = tl.load(row + first)
    b, at = tl.load(width + s), tl.load(offset + s)
    source, normed = tl.load(form + 3 * s), tl.load(form + 3 * s + 2)
    if (count <= 0) | (b == 0):  # behind the loads, so that none waits for another
        return
    one = tl.zeros((1, 1), tl.int32)
    y_row, residual_row = y + x_row * y_stride + one, residual + x_row * residual_stride + one
    live_y, live_residual = one + source != 2, one + source != 0
    mean, inverse = tl.zeros((1,), tl.float32), tl.full((1,), 1.0, tl.float32)
    if normed != 0:
        mean, inverse = _moments(y_row, residual_row, live_y, live_residual, hidden, 1, min(BLOCK_K, 512))
    into = inner + first.to(tl.int64) * room
    blocks = tl.cdiv(b, 16) * (16 // OUTS)  # zeros up to a multiple of 16, which `_up` reads
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        if at % 8 == 0:
            _sums(
                y_row, residual_row, weights + at // 8 * 8, into, live_y, live_residual, mean, inverse, normed, b,
                block * OUTS, hidden, OUTS, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            _sums(
                y_row, residual_row, weights + at, into, live_y, live_residual, mean, inverse, normed, b,
                block * OUTS, hidden, OUTS, min(BLOCK_K, 256), 1,
            )  # fmt: skip


@triton.jit
def _sums(
    y, residual, weights, into, live_y, live_residual, mean, inverse, normed, width, r0, hidden, OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A thread keeps a sum for its eight features of each step; they are added up at the end."""
    k, r = tl.arange(0, BLOCK_K), r0 + tl.arange(0, OUTS)
    norm = weights + (2 * width.to(tl.int64) + 1) * hidden
    down = weights + r.to(tl.int64)[:, None] * hidden
    acc = tl.zeros((OUTS, BLOCK_K // 8), tl.float32)
    for i in tl.range(0, tl.cdiv(hidden, BLOCK_K), num_stages=STAGES):
        kk = i * BLOCK_K + k
        inside = kk < hidden
        down_RK = tl.load(down + kk[None, :], mask=(r < width)[:, None] & inside[None, :], other=0.0)
        x_1K = _input(y, residual, live_y, live_residual, kk, inside)
        if normed != 0:
            gain = tl.load(norm + kk, mask=inside, other=1.0).to(tl.float32)
            shift = tl.load(norm + hidden + kk, mask=inside, other=0.0).to(tl.float32)
            x_1K = (x_1K - mean[:, None]) * inverse[:, None] * gain[None, :] + shift[None, :]
        terms = down_RK.to(tl.float32) * x_1K.to(down_RK.dtype).to(tl.float32)
        acc += tl.sum(tl.reshape(terms, (OUTS, BLOCK_K // 8, 8)), axis=2)
    tl.store(into + r, tl.sum(acc, axis=1))


@triton.jit
def _product(
    y, residual, weights, into, live, live_y, live_residual, mean, inverse, normed, width, k0, hidden,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    k, r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    norm = weights + (2 * width.to(tl.int64) + 1) * hidden
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for i in range(0, tl.cdiv(width, BLOCK_R) * STEPS):
        r0, kk = i // STEPS * BLOCK_R, k0 + i % STEPS * BLOCK_K + k
        inside, wanted = kk < hidden, r0 + r < width
        x_MK = _input(y, residual, live_y, live_residual, kk, inside)
        gain = tl.load(norm + kk, mask=kk < hidden * normed, other=1.0).to(tl.float32)
        shift = tl.load(norm + hidden + kk, mask=kk < hidden * normed, other=0.0).to(tl.float32)
        x_MK = (x_MK - mean[:, None]) * inverse[:, None] * gain[None, :] + shift[None, :]
        at = weights + (r0 + r).to(tl.int64)[:, None] * hidden + kk[None, :]
        down_RK = tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0)
        acc = add_shrunk(acc, x_MK.to(down_RK.dtype), down_RK, BLOCK_M)
        if i % STEPS == STEPS - 1:
            whole = (r0 + r) // 16 < tl.cdiv(width, 16)  # zeros up to a multiple of 16, which `_up` reads
            tl.store(into + (r0 + r)[None, :], acc, mask=live[:, None] & whole[None, :])
            acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)


@triton.jit
def _input(y, residual, live_y, live_residual, k, inside):
    """What the adapter reads, rounded as the sum is in y's dtype."""
    one = tl.load(y + k[None, :], mask=live_y & inside[None, :], other=0.0)
    other = tl.load(residual + k[None, :], mask=live_residual & inside[None, :], other=0.0)
    return (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype).to(tl.float32)


@triton.jit
def _moments(y, residual, live_y, live_residual, hidden, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Mean and 1 / √(variance + ε) of the rows, in two passes."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        total += _input(y, residual, live_y, live_residual, k0 + k, k0 + k < hidden)
    mean = tl.sum(total, axis=1) / hidden
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        inside = k0 + k < hidden
        apart = _input(y, residual, live_y, live_residual, k0 + k, inside) - mean[:, None]
        total += tl.where(inside[None, :], apart * apart, 0.0)
    return mean, tl.rsqrt(tl.sum(total, axis=1) / hidden + 1e-5)


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _up(
    y, weights, row, start, slot, row_slot, offset, width, scale, form, inner, num_rows, num_segments, hidden, room,
    y_stride, SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one tile. What doesn't come from `_down` is loaded before the wait."""
    s, first, count = locate(start, slot, row_slot, tl.program_id(0), num_rows, num_segments, BLOCK_M)
    b, at, weight = tl.load(width + s), tl.load(offset + s), tl.load(scale + s)
    function, normed = tl.load(form + 3 * s + 1), tl.load(form + 3 * s + 2)
    m = tl.arange(0, BLOCK_M)
    rows = tl.load(row + first + m, mask=m < count, other=0)
    if (count <= 0) | (b == 0):
        if PDL:
            gdc_wait()  # so that the end of this launch is the end of both
        return
    y += rows[None, :] * y_stride
    inner += first.to(tl.int64) * room
    n0 = tl.program_id(1) * BLOCK_N
    down_bias = weights + at + (2 * b.to(tl.int64) + 1 + tl.where(normed != 0, 2, 0)) * hidden
    share_stride = num_rows.to(tl.int64) * room
    if at % 8 == 0:
        _update(
            y, weights + at // 8 * 8, down_bias, inner, count, b, n0, hidden, weight, function, room,
            share_stride, SHARES, PADDED, BLOCK_M, BLOCK_N, BLOCK_R, PDL, EARLY,
        )  # fmt: skip
    else:
        for c in range(0, BLOCK_N // 16):
            _update(
                y, weights + at, down_bias, inner, count, b, n0 + c * 16, hidden, weight, function, room,
                share_stride, SHARES, PADDED, BLOCK_M, 16, 16, PDL, EARLY,
            )  # fmt: skip


@triton.jit
def _update(
    y, weights, down_bias, inner, count, width, n0, hidden, scale, function, room, share_stride,
    SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    r, n = tl.arange(0, BLOCK_R), n0 + tl.arange(0, BLOCK_N)
    inside = n < hidden
    mask = inside[:, None] & (tl.arange(0, BLOCK_M) < count)[None, :]
    up = weights + width.to(tl.int64) * hidden
    up_RN = _up_rows(up, r, n, width, hidden)
    # a kernel that begins early may find an older y in L1
    value = tl.load(y + n[:, None], mask=mask, other=0.0, cache_modifier=".cg" if EARLY else "")
    bias = tl.load(up + width.to(tl.int64) * hidden + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if BLOCK_M == 1:
        h_RM = _shifted(inner, down_bias, count, width, 0, room, share_stride, SHARES, PADDED, BLOCK_M, BLOCK_R)
    for r0 in range(0, width, BLOCK_R):
        r1 = r0 + BLOCK_R
        if BLOCK_M > 1:
            h_RM = _shifted(inner, down_bias, count, width, r0, room, share_stride, SHARES, PADDED, BLOCK_M, BLOCK_R)
        acc = add_expanded(acc, up_RN, _activated(h_RM, function), BLOCK_M)
        if BLOCK_M == 1:  # beside the next rows of `up`, so that neither waits for the other
            h_RM = _shifted(inner, down_bias, count, width, r1, room, share_stride, SHARES, PADDED, BLOCK_M, BLOCK_R)
        up_RN = _up_rows(up, r1 + r, n, width, hidden)
    total = value.to(tl.float32) + scale * (acc + bias[:, None])
    tl.store(y + n[:, None], total.to(value.dtype), mask=mask)


@triton.jit
def _shifted(
    inner, down_bias, count, width, r0, room, share_stride,
    SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R sums of `_down` from r0 on with their bias, before φ."""
    r = r0 + tl.arange(0, BLOCK_R)
    h_RM = add_shares(inner, count, width, r0, room, share_stride, SHARES, PADDED, BLOCK_M, BLOCK_R)
    return h_RM + tl.load(down_bias + r, mask=r < width, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _up_rows(up, r, n, width, hidden):
    at = up + r.to(tl.int64)[:, None] * hidden + n[None, :]
    return tl.load(at, mask=(r < width)[:, None] & (n < hidden)[None, :], other=0.0)


@triton.jit
def _activated(x, function):
    """By the numbers of NON_LINEARITIES."""
    if function == 0:
        x = tl.maximum(x, 0.0)
    elif function == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif function == 2:  # x · sigmoid(2 z) is 0.5 x (1 + tanh z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif function == 3:
        x = x * tl.sigmoid(x)
    else:
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return x


def _cuts(num_rows: int, num_segments: int, deterministic: bool, device: torch.device) -> Config | Rows:
    cuts = _narrow(_config(kind_of("bottleneck", num_rows, num_segments, deterministic), device))
    if cuts.shrink_rows > 1:
        return cuts
    return _OVERRIDE.get() or next(cuts for most, cuts in ROWS.items() if num_rows <= most)


def _narrow(cuts: Config) -> Config:
    """Cuts of `_down`, whose input goes through registers."""
    return replace(cuts, block_k=min(cuts.block_k, 256))


def _rows_constants(cuts: Rows, pdl: bool, early: bool) -> dict[str, int | bool]:
    blocks = {"OUTS": cuts.outs, "BLOCK_K": cuts.block_k, "STAGES": cuts.down_stages}
    return {**blocks, "PDL": pdl, "EARLY": early}


def _down_constants(cuts: Config, hidden: int, pdl: bool, early: bool) -> dict[str, int | bool]:
    blocks = {"BLOCK_M": cuts.shrink_rows, "BLOCK_K": cuts.block_k, "BLOCK_R": cuts.shrink_ranks}
    return {"STEPS": cuts.steps(hidden)[0], **blocks, "PDL": pdl, "EARLY": early}


def _up_constants(cuts: Config | Rows, shares: int, pdl: bool, early: bool) -> dict[str, int | bool]:
    rows, ranks = (1, cuts.ranks) if isinstance(cuts, Rows) else (cuts.expand_rows, cuts.expand_ranks)
    blocks = {"BLOCK_M": rows, "BLOCK_N": cuts.block_n, "BLOCK_R": ranks}
    return {"SHARES": shares, "PADDED": next_power_of_2(shares), **blocks, "PDL": pdl, "EARLY": early}


def specimens(capability: int) -> Iterator[Specimen]:
    """Hidden size 4096 in every kind of call, early where few rows are."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    tables = {"row": "*i64", "start": "*i32", "slot": "*i32", "row_slot": "*i32", "offset": "*i64", "width": "*i32"}
    sizes = {"num_rows": "i32", "num_segments": "i32", "hidden": "i32:16", "room": "i32:16", "y_stride": "i32:16"}
    pdl = capability >= 90
    uses: list[tuple[str, Config | Rows, bool]] = [("*bf16", cuts, True) for cuts in ROWS.values()]
    uses.append(("*bf16", ROWS[256], False))
    tiled = [kind for kind in kinds if cuts_of(kind, capability).shrink_rows > 1]
    few = ("group", "few")
    uses += [("*bf16", _narrow(cuts_of(kind, capability)), kind in few) for kind in tiled]
    uses.append(("*fp16", _narrow(cuts_of("few", capability)), True))
    for dtype, cuts, early in uses:
        early = early and pdl
        first = {"y": dtype, "residual": dtype, "weights": dtype, **tables, "form": "*i32", "inner": "*fp32"}
        first |= {**sizes, "residual_stride": "i32:16"}
        second = {"y": dtype, "weights": dtype, **tables, "scale": "*fp32", "form": "*i32", "inner": "*fp32", **sizes}
        if isinstance(cuts, Rows):
            constants, shares = _rows_constants(cuts, pdl, early), 1
            yield Specimen(_down_rows, first | dict.fromkeys(constants, "constexpr"), constants, cuts.down_warps)
            warps, stages = cuts.up_warps, 1
        else:
            constants, shares = _down_constants(cuts, 4096, pdl, early), cuts.steps(4096)[1]
            signature = first | dict.fromkeys(constants, "constexpr")
            yield Specimen(_down, signature, constants, cuts.shrink_warps, cuts.shrink_stages)
            warps, stages = cuts.expand_warps, cuts.expand_stages
        constants = _up_constants(cuts, shares, pdl, early)
        yield Specimen(_up, second | dict.fromkeys(constants, "constexpr"), constants, warps, stages)
