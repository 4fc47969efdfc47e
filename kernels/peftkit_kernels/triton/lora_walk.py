"""Grouped LoRA's expand for programs that stay: each walks over its columns, the next on their way while it adds up."""
# pyright: reportCallIssue=false, reportMissingParameterType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from peftkit_kernels.triton.segmented import locate, projection_of


@triton.jit(do_not_specialize=["num_rows", "num_segments", "num_slots", "blocks"])
def expand_walk(
    y, weights, row, start, slot, row_slot, offset_b, rank, scale, offset_c, inner, num_rows, num_segments, num_slots,
    y_stride, blocks, OUT: tl.constexpr, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STEP_N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, SENDS: tl.constexpr,
):  # fmt: skip
    """`blocks` blocks of BLOCK_N columns of one projection for one tile."""
    s, first, count = locate(start, slot, row_slot, tl.program_id(0), num_rows, num_segments, BLOCK_M)
    p, column, out, walk = projection_of(tl.program_id(1), BLOCK_N * blocks, OUT, PROJECTIONS)
    r = tl.load(rank + p * num_slots + s)
    offset = tl.load(offset_b + p * num_slots + s)
    weight = tl.load(scale + p * num_slots + s)
    rescaling = tl.load(offset_c + p * num_slots + s)
    m = tl.arange(0, BLOCK_M)
    rows = tl.load(row + first + m, mask=m < count, other=0)
    if (count <= 0) | (r == 0):  # behind the loads, so that none waits for another
        if PDL:
            gdc_wait()  # so that the end of this launch is the end of both
        return
    y += column + rows[:, None] * y_stride
    n0 = walk * (BLOCK_N * blocks)
    blocks = tl.minimum(blocks, tl.cdiv(out - n0, BLOCK_N))
    if SENDS:
        n = n0 + tl.arange(0, BLOCK_N // 32) * 64  # a line of 128 bytes in half precision
        k, inside = tl.arange(0, 16), (n < out)[None, :]
        _fetch(y + n[None, :], (m < count)[:, None] & inside)
        _fetch(weights + offset + k[:, None] * out + n[None, :], (k < r)[:, None] & inside)
    if PDL:
        gdc_wait()
    inner += first.to(tl.int64) * (PROJECTIONS * MAX_RANK) + p * MAX_RANK
    share_stride = num_rows.to(tl.int64) * (PROJECTIONS * MAX_RANK)
    rescaling_at = weights + rescaling
    if offset % 8 == 0:
        aligned = weights + offset // 8 * 8  # tells the compiler of 16-byte loads
        if r <= 16:
            _walk(
                y, aligned, rescaling_at, inner, count, r, n0, blocks, out, weight, rescaling, share_stride,
                PROJECTIONS * MAX_RANK, SHARES, BLOCK_M, BLOCK_N, 16, STAGES,
            )  # fmt: skip
        elif (BLOCK_R > 16) & (r <= BLOCK_R):
            _walk(
                y, aligned, rescaling_at, inner, count, r, n0, blocks, out, weight, rescaling, share_stride,
                PROJECTIONS * MAX_RANK, SHARES, BLOCK_M, BLOCK_N, BLOCK_R, 2,
            )  # fmt: skip
        else:
            _step_by_step(
                y, aligned, rescaling_at, inner, count, r, n0, blocks * (BLOCK_N // STEP_N), out, weight, rescaling,
                share_stride, PROJECTIONS * MAX_RANK, SHARES, BLOCK_M, STEP_N, BLOCK_R,
            )  # fmt: skip
    else:
        _step_by_step(
            y, weights + offset, rescaling_at, inner, count, r, n0, blocks * (BLOCK_N // 16), out, weight, rescaling,
            share_stride, PROJECTIONS * MAX_RANK, SHARES, BLOCK_M, 16, 16,
        )  # fmt: skip


@triton.jit
def _fetch(at, mask):
    """Asks for the cache lines of these pointers, so that they are in L2 when they are loaded."""
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [at.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _walk(
    y, b, rescaling_at, inner, count, rank, n0, blocks, out, scale, rescaling, share_stride,
    ROW_STRIDE: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All of the rank at once."""
    m, r, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    live = (m < count)[:, None]
    h_MR = _shares(inner, count, rank, 0, ROW_STRIDE, share_stride, scale, SHARES, BLOCK_M, BLOCK_R)
    h_MR = h_MR.to(b.dtype.element_ty)
    y_MN = y + n[None, :]  # apart from the pointers of loads, which would be kept for the blocks under way
    for i in tl.range(0, blocks, num_stages=STAGES):
        nn = n0 + i * BLOCK_N + n
        inside = (nn < out)[None, :]
        value = tl.load(y + nn[None, :], mask=live & inside, other=0.0)
        b_RN = tl.load(b + r[:, None] * out + nn[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
        total = tl.dot(h_MR, b_RN, value.to(tl.float32), input_precision="ieee")
        if rescaling >= 0:
            total = _rescaled(total, rescaling_at, nn, out)
        tl.store(y_MN + (n0 + i * BLOCK_N), total.to(value.dtype), mask=live & inside)


@triton.jit
def _step_by_step(
    y, b, rescaling_at, inner, count, rank, n0, blocks, out, scale, rescaling, share_stride,
    ROW_STRIDE: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R of the rank at a time."""
    m, r, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    live = (m < count)[:, None]
    steps = tl.cdiv(rank, BLOCK_R)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in tl.range(0, blocks * steps, num_stages=1):
        nn, r0 = n0 + i // steps * BLOCK_N + n, i % steps * BLOCK_R
        inside = (nn < out)[None, :]
        b_RN = tl.load(b + (r0 + r)[:, None] * out + nn[None, :], mask=(r0 + r < rank)[:, None] & inside, other=0.0)
        h_MR = _shares(inner, count, rank, r0, ROW_STRIDE, share_stride, scale, SHARES, BLOCK_M, BLOCK_R)
        total = tl.dot(h_MR.to(b_RN.dtype), b_RN, total, input_precision="ieee")
        if r0 + BLOCK_R >= rank:
            value = tl.load(y + nn[None, :], mask=live & inside, other=0.0)
            total += value.to(tl.float32)
            if rescaling >= 0:
                total = _rescaled(total, rescaling_at, nn, out)
            tl.store(y + nn[None, :], total.to(value.dtype), mask=live & inside)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def _shares(
    inner, count, rank, r0, row_stride, share_stride, scale,
    SHARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """What shrink left of `count` rows from rank r0 on, its shares added in their order, times the scale."""
    m, r = tl.arange(0, BLOCK_M), r0 + tl.arange(0, BLOCK_R)
    at = inner + (m * row_stride)[:, None] + r[None, :]
    mask = (m < count)[:, None] & (r // 16 < tl.cdiv(rank, 16))[None, :]
    total = tl.load(at, mask=mask, other=0.0)
    for share in tl.static_range(1, SHARES):
        total += tl.load(at + share * share_stride, mask=mask, other=0.0)
    return total * scale


@triton.jit
def _rescaled(total_MN, rescaling_at, n, out):
    m_N = tl.load(rescaling_at + n, mask=n < out, other=0.0).to(tl.float32)
    n_N = tl.load(rescaling_at + out + n, mask=n < out, other=0.0).to(tl.float32)
    return total_MN + m_N[None, :] * total_MN + n_N[None, :]
