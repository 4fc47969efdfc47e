"""What both attention kernels do: find a row's request, and fold blocks of positions into a running softmax."""
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e38)
"""A row's maximum before it has seen anything: finite, so that no difference of two is NaN."""


@triton.jit
def find_request(cu_seqlens, num_requests, row):
    """The last request that begins at or before a packed row."""
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) <= row:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def find_tile(cu_seqlens, num_requests, tile, ROWS: tl.constexpr):
    """Tile `tile` of ROWS rows: its request, that request's first packed row, number of rows, and the tile's first.

    Request n's tiles are counted from cu_seqlens[n] // ROWS + n on, so T // ROWS + N tiles hold all whatever the
    lengths; a tile without rows of its own begins behind its request's last.
    """
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(cu_seqlens + low)
    return low, start, tl.load(cu_seqlens + low + 1) - start, (tile - start // ROWS - low) * ROWS


@triton.jit
def walk(
    q, top, total, acc, kv, table, first, end, position, lowest_position, scale, window, num_virtual,
    BLOCK_N: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, NUM_KV: tl.constexpr, PAGE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Folds positions [first, end) into each row's maximum, sum of weights and weighted sum of values.

    kv: base of the keys of this KV head. scale: with log2(e) folded in. position: of each row; `lowest_position` is
    the least of them. Without MASKED every row sees all of [first, end), a multiple of BLOCK_N. A key or value that no
    row sees isn't read, so what stands there can't turn a product into NaN.
    """
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    page = tl.load(table + (first + offs_n) // PAGE, mask=first + offs_n < end, other=0)
    for start in tl.range(first, end, BLOCK_N):
        j = start + offs_n
        mask = (offs_d < HEAD)[None, :]
        if MASKED:
            live = j < end
            if WINDOW:
                live = live & ((j > lowest_position - window) | (j < num_virtual))
            mask = live[:, None] if HEAD == BLOCK_D else live[:, None] & mask
        cell = page.to(tl.int64) * PAGE + j % PAGE
        at = kv + cell[:, None] * (2 * NUM_KV * HEAD) + offs_d[None, :]
        if MASKED or HEAD != BLOCK_D:
            k = tl.load(at, mask=mask, other=0.0)
            v = tl.load(at + NUM_KV * HEAD, mask=mask, other=0.0)
        else:
            k = tl.load(at)
            v = tl.load(at + NUM_KV * HEAD)
        # a step ahead: were it loaded here, keys and values would wait for it and their pipeline would be half as deep
        page = tl.load(table + (j + BLOCK_N) // PAGE, mask=j + BLOCK_N < end, other=0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = (j[None, :] <= position[:, None]) & (j < end)[None, :]
            if WINDOW:
                seen = seen & ((j[None, :] > position[:, None] - window) | (j < num_virtual)[None, :])
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.math.exp2(score * scale - higher[:, None])
        shrink = tl.math.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return top, total, acc
