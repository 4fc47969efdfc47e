"""Attention of single new rows: the query heads of a KV head together, each request's positions in several shares.

The program that finishes a row's last share adds the shares up, in their order: one launch, and the same bits
whichever program that is.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from peftkit_kernels.triton.attention_walk import LOWEST, find_request, walk
from peftkit_kernels.triton.dependent import wait_turn


@triton.jit
def combine(
    part, stat, slot, num_parts,
    GROUP: tl.constexpr, GROUP_2: tl.constexpr, BLOCK_D: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The weighted mean of a row's shares, FOLD at a time; past L1, which other programs' stores don't reach."""
    offs_f, offs_g, offs_d = tl.arange(0, FOLD), tl.arange(0, GROUP_2), tl.arange(0, BLOCK_D)
    top = tl.full([GROUP_2], LOWEST, tl.float32)
    total = tl.zeros([GROUP_2], tl.float32)
    acc = tl.zeros([GROUP_2, BLOCK_D], tl.float32)
    for first in tl.range(0, num_parts, FOLD, num_stages=3):
        at = slot + first + offs_f
        live = (first + offs_f < num_parts)[:, None] & (offs_g < GROUP)[None, :]
        at_stat = stat + at[:, None] * (2 * GROUP) + offs_g[None, :]
        top_FG = tl.load(at_stat, mask=live, other=LOWEST, cache_modifier=".cg")
        total_FG = tl.load(at_stat + GROUP, mask=live, other=1.0, cache_modifier=".cg")
        at_part = part + (at[:, None] * GROUP + offs_g[None, :])[:, :, None] * BLOCK_D + offs_d[None, None, :]
        acc_FGD = tl.load(at_part, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(top_FG, 0))
        weight = tl.math.exp2(top_FG - higher[None, :])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(weight * total_FG, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * acc_FGD, 0)
        top = higher
    return acc / total[:, None]


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "min_share", "window"],
    do_not_specialize_on_alignment=["page", "cu_seqlens", "context", "virtual"],
)
def decode_kernel(
    q, kv, page, cu_seqlens, context, virtual, out, part, stat, arrived, num_requests, table_stride, min_share,
    scale, window,
    Q_STRIDE: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_2: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FOLD: tl.constexpr,
    EACH_ROW: tl.constexpr, WINDOW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (K, X, shares). EACH_ROW: X = T ≤ N, all rows; else X = N, the rows of the requests that have just one.

    A row's positions are shared out evenly, in blocks of BLOCK_N and at least `min_share` to a program, and not at all
    up to twice that. The programs that are left over come last and leave at once. `arrived` counts a row's finished
    shares, and is zero again at the end.
    """
    if DEPENDENT:
        wait_turn()
    head, index, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, row = index, index
    if EACH_ROW:
        if (tl.load(cu_seqlens + index) != index) | (tl.load(cu_seqlens + index + 1) != index + 1):
            n = find_request(cu_seqlens, num_requests, index)
    start, stop = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    if EACH_ROW:
        if row >= stop:
            return
    else:
        if stop - start != 1:
            return
        row = start
    end = tl.load(context + n) - (stop - row) + 1
    begin, num_virtual = 0, 0
    if WINDOW:
        num_virtual = tl.load(virtual + n)
        begin = tl.maximum(end - window, 0) // BLOCK_N * BLOCK_N
    share_size = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    share_size = tl.maximum(share_size, tl.where(end - begin <= 2 * min_share, 2 * min_share, min_share))
    num_shares = tl.cdiv(end - begin, share_size)
    if share >= num_shares:
        return
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_head = (offs_d < HEAD)[None, :]
    live = (offs_m < GROUP)[:, None] & in_head
    row = row.to(tl.int64)
    at_q = q + row * Q_STRIDE + (head * GROUP + offs_m)[:, None] * HEAD + offs_d[None, :]
    q_MD = tl.load(at_q, mask=live, other=0.0)
    position = tl.full([BLOCK_M], 0, tl.int32) + (end - 1)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = page + n * table_stride
    kv_head = kv + head * HEAD
    if WINDOW:
        last = tl.where(share == 0, tl.minimum(begin, num_virtual), 0)
        top, total, acc = walk(
            q_MD, top, total, acc, kv_head, table, 0, last, position, end - 1, scale, window, num_virtual,
            BLOCK_N, HEAD, BLOCK_D, NUM_KV, PAGE, True, WINDOW,
        )  # fmt: skip
    first = begin + share * share_size
    top, total, acc = walk(
        q_MD, top, total, acc, kv_head, table, first, tl.minimum(first + share_size, end), position, end - 1, scale,
        window, num_virtual, BLOCK_N, HEAD, BLOCK_D, NUM_KV, PAGE, True, WINDOW,
    )  # fmt: skip
    out_row = out + (row * NUM_KV + head) * (GROUP * HEAD)
    if num_shares == 1:
        y = acc / total[:, None]
        tl.store(out_row + offs_m[:, None] * HEAD + offs_d[None, :], y.to(out.dtype.element_ty), mask=live)
    else:
        counter = index.to(tl.int64) * NUM_KV + head
        slot = counter * tl.num_programs(2)
        at_stat = stat + (slot + share) * (2 * GROUP) + offs_m
        tl.store(at_stat, top, mask=offs_m < GROUP)
        tl.store(at_stat + GROUP, total, mask=offs_m < GROUP)
        at_part = part + ((slot + share) * GROUP + offs_m)[:, None] * BLOCK_D + offs_d[None, :]
        tl.store(at_part, acc, mask=(offs_m < GROUP)[:, None])
        tl.debug_barrier()  # every thread's stores before the one that counts
        if tl.atomic_add(arrived + counter, 1, sem="acq_rel") == num_shares - 1:
            tl.store(arrived + counter, 0)
            y_GD = combine(part, stat, slot, num_shares, GROUP, GROUP_2, BLOCK_D, FOLD)
            offs_g = tl.arange(0, GROUP_2)
            at_out = out_row + offs_g[:, None] * HEAD + offs_d[None, :]
            tl.store(at_out, y_GD.to(out.dtype.element_ty), mask=(offs_g < GROUP)[:, None] & in_head)
