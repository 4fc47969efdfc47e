"""Attention of many new rows: tiles of rows × query heads of one KV head, each over all that its rows see."""
# pyright: reportMissingParameterType=false, reportArgumentType=false

import triton
import triton.language as tl

from peftkit_kernels.triton.attention_walk import LOWEST, find_tile, walk


@triton.jit(
    do_not_specialize=["num_requests", "min_rows", "table_stride", "window"],
    do_not_specialize_on_alignment=["page", "cu_seqlens", "context", "virtual"],
)
def prefill_kernel(
    q, kv, page, cu_seqlens, context, virtual, out, num_requests, min_rows, table_stride, scale, window,
    Q_STRIDE: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (K, tiles): the requests' tiles one request after another; the last, which see most, run first.

    A request with fewer than `min_rows` rows is left alone. Entry m of a tile is row m // GROUP, head m % GROUP.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    n, start, num_rows, first_row = find_tile(cu_seqlens, num_requests, tile, ROWS)
    if (first_row >= num_rows) | (num_rows < min_rows):
        return
    num_context = tl.load(context + n)
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row = first_row + offs_m // GROUP
    live = (row < num_rows) & (offs_m < ROWS * GROUP)
    heads = head * GROUP + offs_m % GROUP
    in_head = (offs_d < HEAD)[None, :]
    at_q = q + (start + row).to(tl.int64)[:, None] * Q_STRIDE + heads[:, None] * HEAD + offs_d[None, :]
    q_MD = tl.load(at_q, mask=live[:, None] & in_head, other=0.0)
    before = num_context - num_rows
    lowest_position = before + first_row
    end = tl.minimum(lowest_position + ROWS, num_context)
    position = tl.minimum(before + row, end - 1)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = page + n * table_stride
    kv_head = kv + head * HEAD
    num_virtual, begin = 0, 0
    split = (lowest_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        num_virtual = tl.load(virtual + n)
        begin = tl.maximum(lowest_position - window + 1, 0) // BLOCK_N * BLOCK_N
        split = tl.minimum(begin, num_virtual)
    top, total, acc = walk(
        q_MD, top, total, acc, kv_head, table, 0, split, position, lowest_position, scale, window, num_virtual,
        BLOCK_N, HEAD, BLOCK_D, NUM_KV, PAGE, WINDOW, WINDOW,
    )  # fmt: skip
    top, total, acc = walk(
        q_MD, top, total, acc, kv_head, table, begin if WINDOW else split, end, position, lowest_position, scale,
        window, num_virtual, BLOCK_N, HEAD, BLOCK_D, NUM_KV, PAGE, True, WINDOW,
    )  # fmt: skip
    at_out = out + (start + row).to(tl.int64)[:, None] * (NUM_KV * GROUP * HEAD) + heads[:, None] * HEAD
    y = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(at_out + offs_d[None, :], y, mask=live[:, None] & in_head)
