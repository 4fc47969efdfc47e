"""Attention whose bits depend on a row's own position alone: one kernel for single rows and for prompts.

Positions are taken in spans of fixed size from position 0, each with its own softmax, and the spans are folded in
their order by the same three operations whether they come out of registers or out of memory.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from peftkit_kernels.triton.attention_walk import LOWEST, find_tile, walk


@triton.jit
def fold(top, total, acc, span_top, span_total, span_acc):
    """Adds a span to what came before it; `fma` leaves the compiler no choice of rounding."""
    higher = tl.maximum(top, span_top)
    old, new = tl.math.exp2(top - higher), tl.math.exp2(span_top - higher)
    total = tl.fma(total, old, span_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), span_acc * new[:, None])
    return higher, total, acc


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "max_spans", "window"],
    do_not_specialize_on_alignment=["page", "cu_seqlens", "context", "virtual"],
)
def steady_kernel(
    q, kv, page, cu_seqlens, context, virtual, out, part, stat, arrived, num_requests, table_stride, max_spans, scale,
    window,
    Q_STRIDE: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (K, shares, tiles). The spans of a request with one new row are dealt out to the shares; a tile of a longer
    chunk has one program. Entry m of a tile is row m // GROUP, head m % GROUP."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    head, share = tl.program_id(0), tl.program_id(1)
    n, start, num_rows, first_row = find_tile(cu_seqlens, num_requests, tl.program_id(2), ROWS)
    if first_row >= num_rows:
        return
    num_context = tl.load(context + n)
    before = num_context - num_rows
    lowest_position = before + first_row
    end = tl.minimum(lowest_position + ROWS, num_context)
    num_spans = tl.cdiv(end, SPAN)
    num_shares = tl.where(num_rows == 1, tl.minimum(num_spans, tl.num_programs(1)), 1)
    if share >= num_shares:
        return
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = first_row + offs_m // GROUP
    in_head = (offs_d < HEAD)[None, :]
    live = ((row < num_rows) & (offs_m < ROWS * GROUP))[:, None] & in_head
    heads = head * GROUP + offs_m % GROUP
    packed = (start + row).to(tl.int64)[:, None]
    q_MD = tl.load(q + packed * Q_STRIDE + heads[:, None] * HEAD + offs_d[None, :], mask=live, other=0.0)
    position = tl.minimum(before + row, end - 1)
    begin, num_virtual, prefix = 0, 0, 0
    if WINDOW:
        num_virtual = tl.load(virtual + n)
        begin = tl.maximum(lowest_position - window + 1, 0) // BLOCK_N * BLOCK_N
        prefix = tl.minimum(begin, num_virtual)
    table = page + n * table_stride
    kv_head = kv + head * HEAD
    counter = tl.cast(n, tl.int64) * NUM_KV + head
    slot = counter * max_spans
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for span in tl.range(share, num_spans, num_shares):
        first, last = span * SPAN, tl.minimum(span * SPAN + SPAN, end)
        span_top = tl.full([BLOCK_M], LOWEST, tl.float32)
        span_total = tl.zeros([BLOCK_M], tl.float32)
        span_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if WINDOW:
            span_top, span_total, span_acc = walk(
                q_MD, span_top, span_total, span_acc, kv_head, table, first, tl.minimum(last, prefix), position,
                lowest_position, scale, window, num_virtual, BLOCK_N, HEAD, BLOCK_D, NUM_KV, PAGE, True, WINDOW,
            )  # fmt: skip
        span_top, span_total, span_acc = walk(
            q_MD, span_top, span_total, span_acc, kv_head, table, tl.maximum(first, begin), last, position,
            lowest_position, scale, window, num_virtual, BLOCK_N, HEAD, BLOCK_D, NUM_KV, PAGE, True, WINDOW,
        )  # fmt: skip
        if num_shares > 1:
            at = slot + span
            tl.store(stat + at * (2 * GROUP) + offs_m, span_top, mask=offs_m < GROUP)
            tl.store(stat + at * (2 * GROUP) + GROUP + offs_m, span_total, mask=offs_m < GROUP)
            at_part = part + (at * GROUP + offs_m)[:, None] * BLOCK_D + offs_d[None, :]
            tl.store(at_part, span_acc, mask=(offs_m < GROUP)[:, None])
        top, total, acc = fold(top, total, acc, span_top, span_total, span_acc)
    finished = num_shares - 1  # shares that were there before this one
    if num_shares > 1:
        tl.debug_barrier()  # every thread's stores before the one that counts
        finished = tl.atomic_add(arrived + counter, 1, sem="acq_rel")
        if finished == num_shares - 1:
            tl.store(arrived + counter, 0)
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for span in tl.range(0, num_spans):
                at = slot + span
                at_stat = stat + at * (2 * GROUP) + offs_m
                span_top = tl.load(at_stat, mask=offs_m < GROUP, other=LOWEST, cache_modifier=".cg")
                span_total = tl.load(at_stat + GROUP, mask=offs_m < GROUP, other=0.0, cache_modifier=".cg")
                at_part = part + (at * GROUP + offs_m)[:, None] * BLOCK_D + offs_d[None, :]
                span_acc = tl.load(at_part, mask=(offs_m < GROUP)[:, None], other=0.0, cache_modifier=".cg")
                top, total, acc = fold(top, total, acc, span_top, span_total, span_acc)
    if finished == num_shares - 1:
        at_out = out + packed * (NUM_KV * GROUP * HEAD) + heads[:, None] * HEAD + offs_d[None, :]
        tl.store(at_out, (acc / total[:, None]).to(out.dtype.element_ty), mask=live)
