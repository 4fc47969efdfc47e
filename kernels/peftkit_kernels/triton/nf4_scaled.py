"""A product of NF4 weights with some tens of rows of x, whose weights are scaled before it.

As `nf4_wide`, but that a step's codes and x come to shared memory some steps ahead, and a scale is multiplied into the
weights, two at a time, rather than into the sum over its block: then sums stay with the tensor cores, which work on one
step while the next one's weights are decoded. Scales and scaled weights are rounded to x's dtype. x must lie in the
order in which a lane has its codes (`spread_kernel`), so that nothing is dealt out on the way.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from peftkit_kernels.triton.dependent import wait_turn
from peftkit_kernels.triton.nf4_few import finish, share
from peftkit_kernels.triton.nf4_table import fill_levels, scaled_levels, settle


@triton.jit(do_not_specialize=["num_rows"])
def scaled_kernel(
    x, code, absmax, absmax_code, absmax_scale, absmax_offset, bias, y, sums, arrived, num_rows,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    MOST: tl.constexpr, OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, TABLE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile has 16 outputs for each warp and all ROWS rows of x; a step, one block of it."""
    depth: tl.constexpr = IN // 64
    outs: tl.constexpr = WARPS * 16
    tiles: tl.constexpr = (OUT + outs - 1) // outs
    column = 0
    if TABLE:
        column = fill_levels(x.dtype.element_ty)
    if DEPENDENT:
        wait_turn()
    column = settle(column, TABLE)
    place, unit = tl.arange(0, outs), tl.arange(0, 16)
    place = place // 8 % WARPS * 16 + place // (8 * WARPS) * 8 + place % 8  # a warp's 16 outputs as two eights
    inputs_at = x + tl.arange(0, ROWS)[:, None] * IN + tl.arange(0, 64)[None, :]
    first, last = share(tiles, depth, MOST)
    while first < last:
        tile, begin = first // depth, first % depth
        end = tl.minimum(depth, begin + last - first)
        out = tl.minimum(tile * outs + place, OUT - 1)  # a ragged tile reads the last row again: no masks
        offset = tl.load(absmax_offset + (out * depth // 256 if OFFSETS else out * 0))
        codes_at = code + out[:, None].to(tl.int64) * (IN // 4) + unit[None, :]
        total = tl.zeros((outs, ROWS), tl.float32)
        for part in tl.range(begin, end, num_stages=STAGES):
            packed = tl.load(tl.max_contiguous(codes_at + part * 16, [1, 4]))
            inputs = tl.load(inputs_at + part * 64)
            block = out * depth + part
            factor = tl.load(absmax_code + tl.load(absmax + block).to(tl.int32))
            factor = factor * tl.load(absmax_scale + block // 256) + offset
            factor = tl.broadcast_to(factor.to(x.dtype.element_ty)[:, None], (outs, 16))
            w0, w1, w2, w3 = scaled_levels(packed, factor, column, x.dtype.element_ty, TABLE)
            weights = tl.join(tl.join(w0, w1), tl.join(w2, w3))
            weights = tl.reshape(weights, (2, WARPS, 8, 4, 2, 2, 2, 2))  # …, lane, word, i, q in two bits
            weights = tl.reshape(tl.permute(weights, (1, 0, 2, 4, 7, 6, 3, 5)), (outs, 64))
            total = tl.dot(weights, tl.trans(inputs), total, input_precision="ieee")
        finish(
            tl.reshape(total, (1, outs, ROWS)), bias, y, sums, arrived, num_rows, tile, tiles * depth, depth, 0, 1, OUT,
            ROWS, 1, 1, outs, MOST, HAS_BIAS,
        )  # fmt: skip
        first += end - begin


@triton.jit(do_not_specialize=["num_rows"])
def spread_kernel(x, spread, num_rows, x_stride, IN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Copies a row of x, zeros behind the last one, each block of 64 inputs in the order of their weights."""
    if DEPENDENT:
        wait_turn()
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row.to(tl.int64) * x_stride + at, mask=(at < IN) & (row + at * 0 < num_rows), other=0.0)
    value = tl.permute(tl.reshape(value, (BLOCK // 64, 4, 4, 2, 2)), (0, 2, 3, 1, 4))  # lane, word and q, q, i
    tl.store(spread + row.to(tl.int64) * IN + at, tl.reshape(value, (BLOCK,)), mask=at < IN)
