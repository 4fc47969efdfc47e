"""Grouped LoRA: x Aᵀ over shares of the features (`_shrink`), then (x Aᵀ) B onto y (`_expand`).

Bound by memory: A and B of the distinct adapters at few rows, y at many.

Where x is settled and rows are few, shrink takes what the product that y comes from leaves free of each multiprocessor
and runs beside it. It waits for the product at its end alone, so that the end of shrink is the end of both.
"""
# pyright: reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peftkit_kernels.segments import MAX_RANK
from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.dependent import MAX_ROWS, begins_early, launch_options, wait_turn
from peftkit_kernels.triton.device import capability_of, scratch_of
from peftkit_kernels.triton.lora_walk import expand_walk
from peftkit_kernels.triton.segmented import (
    BESIDE,
    CONFIGS,
    Config,
    Kind,
    add_expanded,
    add_shares,
    add_shrunk,
    candidates,
    cuts_of,
    kind_of,
    locate,
    override,
    projection_of,
    tiles_of,
)
from peftkit_kernels.triton.segmented import config as _config

__all__ = ["CONFIGS", "candidates", "grouped_lora", "override", "specimens"]


def grouped_lora(
    y_TO: Tensor,
    x_TI: Tensor,
    weights: Tensor,
    row_X: Tensor,
    segment_start_G1: Tensor,
    segment_slot_G: Tensor,
    row_slot_X: Tensor,
    offset_a_PS: Tensor,
    offset_b_PS: Tensor,
    rank_PS: Tensor,
    scale_PS: Tensor,
    offset_c_PS: Tensor,
    out_features: tuple[int, ...],
    *,
    x_settled: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """See `peftkit_kernels.grouped.grouped_lora`; ranks up to MAX_RANK. Quickest where offsets are multiples of 8."""
    num_rows, num_segments = row_X.shape[0], segment_slot_G.shape[0]
    if not num_rows or not num_segments:
        return y_TO
    assert y_TO.stride(1) == 1 and x_TI.stride(1) == 1, "rows of x and y are contiguous"
    tables = (offset_a_PS, offset_b_PS, rank_PS, scale_PS, offset_c_PS)
    assert all(table.is_contiguous() for table in tables), "tables are contiguous"
    num_projections, features = len(out_features), x_TI.shape[1]
    columns = sum(out_features) / features
    early = x_settled and begins_early(y_TO.device, max(num_rows, y_TO.shape[0]))
    kind = kind_of("lora", num_rows, num_segments, deterministic, columns)
    early = early and kind in BESIDE
    cuts = _config(kind, y_TO.device, beside=early)
    if cuts.shrink_rows == 1 and columns >= 4:  # fewer shares, as each of the many programs of expand adds all up
        cuts = replace(cuts, splits=max(1, cuts.splits // 2))
    _, shares = cuts.steps(features)
    inner = _inner(shares, num_rows, num_projections, early, y_TO.device)
    rows = (row_X, segment_start_G1, segment_slot_G, row_slot_X)
    sizes = (num_rows, num_segments, offset_a_PS.shape[1])
    pdl = capability_of(y_TO.device, 80) >= 90
    launch = launch_options(pdl)
    constants = _shrink_constants(cuts, num_projections, features, pdl, early)
    tiles = tiles_of(num_rows, num_segments, cuts.shrink_rows)
    # early or not at all: expand reads y before it waits for shrink, and then what wrote y must have ended
    grid = (tiles, shares * (num_projections // constants["TOGETHER"]))
    tensors = (x_TI, weights, *rows, offset_a_PS, rank_PS, inner)
    strides = (features, x_TI.stride(0))
    _launch_shrink(grid, tensors, sizes, strides, (*constants.values(),), cuts.shrink_warps, **launch_options(early))
    tiles = tiles_of(num_rows, num_segments, cuts.expand_rows)
    tensors = (y_TO, weights, *rows, offset_b_PS, rank_PS, scale_PS, offset_c_PS, inner)
    if cuts.blocks:
        blocks = _blocks(cuts, out_features)
        walks = sum(cdiv(out, cuts.block_n * blocks) for out in out_features)
        constants = _walk_constants(cuts, out_features, shares, pdl)
        strides = (y_TO.stride(0), blocks)
        _launch_walk((tiles, walks), tensors, sizes, strides, (*constants.values(),), cuts.expand_warps, **launch)
        return y_TO
    grid = (tiles, sum(cdiv(out, cuts.block_n) for out in out_features))
    constants = _expand_constants(cuts, out_features, shares, pdl, early)
    options = {"num_stages": cuts.expand_stages, **launch}
    _launch_expand(grid, tensors, sizes, (y_TO.stride(0),), (*constants.values(),), cuts.expand_warps, **options)
    return y_TO


@triton.jit(do_not_specialize=["num_rows", "num_segments", "num_slots"])
def _shrink(
    x, weights, row, start, slot, row_slot, offset_a, rank, inner, num_rows, num_segments, num_slots, features,
    x_stride, PROJECTIONS: tl.constexpr, TOGETHER: tl.constexpr, PADDED: tl.constexpr, MAX_RANK: tl.constexpr,
    SHARES: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One share of the features of one tile, for TOGETHER projections: inner (SHARES, X, PROJECTIONS, MAX_RANK)."""
    if PDL:
        gdc_launch_dependents()
    s, first, count = locate(start, slot, row_slot, tl.program_id(0), num_rows, num_segments, BLOCK_M)
    if count <= 0:
        if EARLY:
            gdc_wait()
        return
    share, p0 = tl.program_id(1) % SHARES, tl.program_id(1) // SHARES * TOGETHER
    m = tl.arange(0, BLOCK_M)
    live = m < count
    rows = tl.load(row + first + m, mask=live, other=0)
    p = tl.arange(0, PADDED)
    ranks = tl.load(rank + (p0 + p) * num_slots + s, mask=p < TOGETHER, other=0)
    offsets = tl.load(offset_a + (p0 + p) * num_slots + s, mask=p < TOGETHER, other=0)
    largest = tl.max(ranks, axis=0)
    aligned = tl.max(tl.where(ranks > 0, offsets % 8, 0), axis=0) == 0
    x += share * (STEPS * BLOCK_K)
    k0 = share * (STEPS * BLOCK_K)
    weights += k0
    features_left = features - k0
    into = inner + ((share * num_rows + first).to(tl.int64) * PROJECTIONS + p0) * MAX_RANK
    if aligned:
        if (largest <= 16) & (BLOCK_R > 16):  # one branch where both are the same, as each has its own shared memory
            _shares_of(
                x, weights, offset_a, rank, into, rows, live, s, p0, largest, num_slots, features, features_left,
                x_stride, PROJECTIONS, TOGETHER, PADDED, MAX_RANK, STEPS, BLOCK_M, BLOCK_K, 16, STAGES, True, EARLY,
            )  # fmt: skip
        else:
            _shares_of(
                x, weights, offset_a, rank, into, rows, live, s, p0, largest, num_slots, features, features_left,
                x_stride, PROJECTIONS, TOGETHER, PADDED, MAX_RANK, STEPS, BLOCK_M, BLOCK_K, BLOCK_R, STAGES, True,
                EARLY,
            )  # fmt: skip
    else:
        _shares_of(
            x, weights, offset_a, rank, into, rows, live, s, p0, largest, num_slots, features, features_left,
            x_stride, PROJECTIONS, TOGETHER, PADDED, MAX_RANK, STEPS * BLOCK_K // 16, BLOCK_M, 16, 16, 1, False,
            EARLY,
        )  # fmt: skip
    if EARLY:
        gdc_wait()


@triton.jit
def _shares_of(
    x, weights, offset_a, rank, into, rows, live, s, p0, largest, num_slots, features, features_left, x_stride,
    PROJECTIONS: tl.constexpr, TOGETHER: tl.constexpr, PADDED: tl.constexpr, MAX_RANK: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rank after rank in one loop, so that the loads of the next are under way: BLOCK_R of each projection a step."""
    n = tl.arange(0, PADDED * BLOCK_R)
    p, r = n // BLOCK_R, n % BLOCK_R
    mine = p < TOGETHER
    ranks = tl.load(rank + (p0 + p) * num_slots + s, mask=mine, other=0)
    offsets = tl.load(offset_a + (p0 + p) * num_slots + s, mask=mine, other=0)
    if ALIGNED:
        offsets = offsets // 8 * 8  # tells the compiler of 16-byte loads
    k = tl.arange(0, BLOCK_K)
    x_rows = x + rows[:, None] * x_stride
    m = tl.arange(0, BLOCK_M)
    into_rows = into + m[:, None] * (PROJECTIONS * MAX_RANK) + (p * MAX_RANK + r)[None, :]
    acc = tl.zeros((BLOCK_M, PADDED * BLOCK_R), dtype=tl.float32)
    for i in tl.range(0, tl.cdiv(largest, BLOCK_R) * STEPS, num_stages=STAGES):
        r0, kk = i // STEPS * BLOCK_R, i % STEPS * BLOCK_K + k
        inside, wanted = kk < features_left, r0 + r < ranks
        x_at, x_mask = x_rows + kk[None, :], live[:, None] & inside[None, :]
        # a kernel that begins early may find an older x in L1
        x_MK = tl.load(x_at, mask=x_mask, other=0.0, cache_modifier=".cg" if EARLY else "")
        at = weights + (offsets + (r0 + r) * features)[:, None] + kk[None, :]
        a_NK = tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0)
        acc = add_shrunk(acc, x_MK, a_NK, BLOCK_M)
        if i % STEPS == STEPS - 1:
            whole = (r0 + r) // 16 < tl.cdiv(ranks, 16)  # zeros up to a multiple of 16, which expand reads
            tl.store(into_rows + r0, acc, mask=live[:, None] & whole[None, :])
            acc = tl.zeros((BLOCK_M, PADDED * BLOCK_R), dtype=tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_segments", "num_slots"])
def _expand(
    y, weights, row, start, slot, row_slot, offset_b, rank, scale, offset_c, inner, num_rows, num_segments, num_slots,
    y_stride, OUT: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, SHARES: tl.constexpr,
    PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one projection for one tile. What doesn't come from `_shrink`, nor from the product that it
    runs beside, is loaded before the wait."""
    s, first, count = locate(start, slot, row_slot, tl.program_id(0), num_rows, num_segments, BLOCK_M)
    p, column, out, block = projection_of(tl.program_id(1), BLOCK_N, OUT, PROJECTIONS)
    r = tl.load(rank + p * num_slots + s)
    offset = tl.load(offset_b + p * num_slots + s)
    weight = tl.load(scale + p * num_slots + s)
    rescaling = tl.load(offset_c + p * num_slots + s)
    m = tl.arange(0, BLOCK_M)
    rows = tl.load(row + first + m, mask=m < count, other=0)
    if (count <= 0) | (r == 0):  # behind the loads, so that none waits for another
        if PDL:
            wait_turn()  # so that the end of this launch is the end of both
        return
    y += column + rows[None, :] * y_stride
    n0 = block * BLOCK_N
    inner += first.to(tl.int64) * (PROJECTIONS * MAX_RANK) + p * MAX_RANK
    share_stride = num_rows.to(tl.int64) * (PROJECTIONS * MAX_RANK)
    rescaling_at = weights + rescaling
    if offset % 8 == 0:
        aligned = weights + offset // 8 * 8  # tells the compiler of 16-byte loads
        if (r <= 16) & (BLOCK_R > 16):
            _update(
                y, aligned, rescaling_at, inner, count, r, n0, out, weight, rescaling, share_stride,
                PROJECTIONS * MAX_RANK, SHARES, PADDED, BLOCK_M, BLOCK_N, 16, PDL, EARLY,
            )  # fmt: skip
        else:
            _update(
                y, aligned, rescaling_at, inner, count, r, n0, out, weight, rescaling, share_stride,
                PROJECTIONS * MAX_RANK, SHARES, PADDED, BLOCK_M, BLOCK_N, BLOCK_R, PDL, EARLY,
            )  # fmt: skip
    else:
        for c in range(0, BLOCK_N // 16):
            _update(
                y, weights + offset, rescaling_at, inner, count, r, n0 + c * 16, out, weight, rescaling, share_stride,
                PROJECTIONS * MAX_RANK, SHARES, PADDED, BLOCK_M, 16, 16, PDL, EARLY,
            )  # fmt: skip


@triton.jit
def _update(
    y, b, rescaling_at, inner, count, rank, n0, out, scale, rescaling, share_stride, ROW_STRIDE: tl.constexpr,
    SHARES: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Columns are the long side of the product, so that few rows take few registers."""
    r, n = tl.arange(0, BLOCK_R), n0 + tl.arange(0, BLOCK_N)
    inside = n < out
    mask = inside[:, None] & (tl.arange(0, BLOCK_M) < count)[None, :]
    b_RN = tl.load(b + r[:, None] * out + n[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0)
    if EARLY:
        wait_turn()
    value = tl.load(y + n[:, None], mask=mask, other=0.0)
    if PDL:
        wait_turn()
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        h_RM = add_shares(inner, count, rank, r0, ROW_STRIDE, share_stride, SHARES, PADDED, BLOCK_M, BLOCK_R)
        acc = add_expanded(acc, b_RN, h_RM, BLOCK_M)
        wanted = (r0 + BLOCK_R + r < rank)[:, None] & inside[None, :]
        b_RN = tl.load(b + (r0 + BLOCK_R + r)[:, None] * out + n[None, :], mask=wanted, other=0.0)
    total = value.to(tl.float32) + acc * scale
    if rescaling >= 0:
        m_N = tl.load(rescaling_at + n, mask=inside, other=0.0).to(tl.float32)
        n_N = tl.load(rescaling_at + out + n, mask=inside, other=0.0).to(tl.float32)
        total += m_N[:, None] * total + n_N[:, None]
    tl.store(y + n[:, None], total.to(value.dtype), mask=mask)


def _blocks(cuts: Config, out_features: tuple[int, ...]) -> int:
    """Blocks of a walk, a power of two: fewer where a tile would have less than some six walks."""
    walks = sum(cdiv(out, cuts.block_n) for out in out_features) // 6
    return min(cuts.blocks, 1 << max(walks, 1).bit_length() - 1)


def _inner(shares: int, num_rows: int, num_projections: int, early: bool, device: torch.device) -> Tensor:
    """Memory between the launches, (shares, X, P, MAX_RANK). Of an early shrink it's nobody else's: freshly allocated
    it could be what the kernel that still runs works with."""
    if early:
        return scratch_of("lora", shares * MAX_ROWS * num_projections * MAX_RANK, device)
    return torch.empty((shares, num_rows, num_projections, MAX_RANK), dtype=torch.float32, device=device)


def _shrink_constants(
    cuts: Config, num_projections: int, features: int, pdl: bool, early: bool
) -> dict[str, int | bool]:
    steps, shares = cuts.steps(features)
    together = num_projections if cuts.together else 1
    padded = next_power_of_2(together)
    return {
        "PROJECTIONS": num_projections,
        "TOGETHER": together,
        "PADDED": padded,
        "MAX_RANK": MAX_RANK,
        "SHARES": shares,
        "STEPS": steps,
        "BLOCK_M": cuts.shrink_rows,
        "BLOCK_K": cuts.block_k,
        "BLOCK_R": cuts.shrink_ranks,
        "STAGES": cuts.shrink_stages,
        "PDL": pdl,
        "EARLY": early,
    }


def _expand_constants(
    cuts: Config, out_features: tuple[int, ...], shares: int, pdl: bool, early: bool
) -> dict[str, object]:
    return {
        "OUT": tuple(out_features),
        "PROJECTIONS": len(out_features),
        "MAX_RANK": MAX_RANK,
        "SHARES": shares,
        "PADDED": next_power_of_2(shares),
        "BLOCK_M": cuts.expand_rows,
        "BLOCK_N": cuts.block_n,
        "BLOCK_R": cuts.expand_ranks,
        "PDL": pdl,
        "EARLY": early,
    }


def _walk_constants(cuts: Config, out_features: tuple[int, ...], shares: int, pdl: bool) -> dict[str, object]:
    constants = _expand_constants(cuts, out_features, shares, pdl, early=False)
    del constants["PADDED"], constants["EARLY"], constants["PDL"]
    return {
        **constants,
        "STEP_N": min(cuts.block_n, 64),
        "STAGES": cuts.expand_stages,
        "PDL": pdl,
        "SENDS": pdl and cuts.sends,
    }


_launch_shrink, _launch_expand, _launch_walk = Again(_shrink), Again(_expand), Again(expand_walk)


def specimens(capability: int) -> Iterator[Specimen]:
    """q, k, v of Llama 8B in every kind of call, and beside its product where that is done; down at few rows."""
    qkv, pdl = (4096, 1024, 1024), capability >= 90
    uses: list[tuple[Config, str, tuple[int, ...], int, bool]]
    uses = [(cuts_of(kind, capability), "*bf16", qkv, 4096, False) for kind in get_args(Kind)]
    uses += [(cuts, "*bf16", qkv, 4096, True) for cuts in BESIDE.values() if pdl]
    few = cuts_of("few", capability)
    uses += [(few, "*fp16", qkv, 4096, False), (few, "*bf16", (4096,), 14336, False)]
    tables = {"row": "*i64", "start": "*i32", "slot": "*i32", "row_slot": "*i32"}
    sizes = dict.fromkeys(("num_rows", "num_segments", "num_slots"), "i32")
    for cuts, dtype, out, features, early in uses:
        constants = _shrink_constants(cuts, len(out), features, pdl, early)
        first = {"x": dtype, "weights": dtype, **tables, "offset_a": "*i64", "rank": "*i32", "inner": "*fp32"}
        signature = {**first, **sizes, "features": "i32:16", "x_stride": "i32:16"}
        signature |= dict.fromkeys(constants, "constexpr")
        yield Specimen(_shrink, signature, constants, cuts.shrink_warps, cuts.shrink_stages)
        shares = cuts.steps(features)[1]
        second = {"offset_b": "*i64", "rank": "*i32", "scale": "*fp32", "offset_c": "*i64", "inner": "*fp32"}
        signature = {"y": dtype, "weights": dtype, **tables, **second, **sizes, "y_stride": "i32:16"}
        if cuts.blocks:
            constants = _walk_constants(cuts, out, shares, pdl)
            signature |= {"blocks": "i32", **dict.fromkeys(constants, "constexpr")}
            yield Specimen(expand_walk, signature, constants, cuts.expand_warps)
        else:
            constants = _expand_constants(cuts, out, shares, pdl, early)
            signature |= dict.fromkeys(constants, "constexpr")
            yield Specimen(_expand, signature, constants, cuts.expand_warps, cuts.expand_stages)
