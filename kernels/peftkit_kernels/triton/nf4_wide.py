"""A product of NF4 weights with some tens of rows of x, which the tensor cores read from shared memory.

As `nf4_few`, but that x of a block is dealt out in shared memory once for all warps, in the order in which weights lie
in their registers. For compute capability 9, whose tensor cores (wgmma) take the tall operand from registers and the
other from shared memory: with `nf4_few` each warp would load all of x for itself.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from peftkit_kernels.triton.dependent import wait_turn
from peftkit_kernels.triton.nf4_few import (
    codes,
    factor,
    finish_in_pieces,
    first_offset,
    nested,
    next_offset,
    scale_codes,
    share,
)
from peftkit_kernels.triton.nf4_table import fill_levels, pair_levels, settle


@triton.jit(do_not_specialize=["num_rows"])
def wide_kernel(
    x, code, absmax, absmax_code, absmax_scale, absmax_offset, bias, y, sums, arrived, num_rows, x_stride,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr,
    PIECES: tl.constexpr, MOST: tl.constexpr, OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, TABLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile has 16 outputs for each warp and ROWS rows of x; a step, one block of it."""
    depth: tl.constexpr = IN // 64
    tiles: tl.constexpr = (OUT + WARPS * 16 - 1) // (WARPS * 16) * ROW_TILES
    steps: tl.constexpr = tiles * depth
    first, last = share(tiles, depth, MOST)
    packed = codes(code, first // depth // ROW_TILES, first % depth, OUT, IN, 1, WARPS, 16, 1)
    byte = scale_codes(absmax, 0, first // depth // ROW_TILES, first % depth, 0, OUT, IN, 1, WARPS, 16, 1, 1)
    column = 0
    offset = first_offset(absmax_offset, first // depth // ROW_TILES, first % depth, OUT, IN, 1, WARPS, 16, 1, OFFSETS)
    if TABLE:
        column = fill_levels(x.dtype.element_ty)
    if DEPENDENT:
        wait_turn()
    value = _block(x, x_stride, first // depth % ROW_TILES * ROWS, first % depth, num_rows, ROWS)
    column = settle(column, TABLE)  # a table of scales would be the byte too much that a launch without options has
    total = tl.zeros((WARPS * 16, ROWS), tl.float32)
    for step in range(first, last):
        ahead = tl.minimum(step + 1, last - 1)
        next_packed = codes(code, ahead // depth // ROW_TILES, ahead % depth, OUT, IN, 1, WARPS, 16, 1)
        next_byte = scale_codes(absmax, 0, ahead // depth // ROW_TILES, ahead % depth, 0, OUT, IN, 1, WARPS, 16, 1, 1)
        next_value = _block(x, x_stride, ahead // depth % ROW_TILES * ROWS, ahead % depth, num_rows, ROWS)
        tile, part = step // depth, step % depth
        inputs = tl.reshape(value, (ROWS, 4, 2, 2, 2, 2))  # lane, word, q in two bits, i
        inputs = tl.reshape(tl.permute(inputs, (2, 3, 4, 1, 5, 0)), (64, ROWS))
        w0, w1, w2, w3 = pair_levels(packed, column, x.dtype.element_ty, TABLE)
        weights = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        weights = tl.reshape(weights, (WARPS, 16, 2, 4, 2, 2, 2))  # …, word, lane, i, q in two bits
        weights = tl.reshape(tl.permute(weights, (0, 1, 2, 6, 5, 3, 4)), (WARPS * 16, 64))
        product = tl.dot(weights, inputs, input_precision="ieee")
        outer = nested(absmax_scale, 0.0, tile // ROW_TILES, part, 0, OUT, IN, 1, WARPS, 16, 1)
        offset = next_offset(absmax_offset, offset, tile // ROW_TILES, part, OUT, IN, 1, WARPS, 16, 1, OFFSETS)
        scale = factor(outer, byte, offset, 0, absmax_code, ROWS, 1, WARPS, 16, False)
        total += product * tl.reshape(scale, (WARPS * 16, ROWS))
        if (part == depth - 1) | (step == last - 1):
            if PIECES == 2:
                shaped = tl.reshape(total, (WARPS, 16, ROWS))
            else:
                shaped = tl.sum(tl.reshape(total, (WARPS, 16, ROWS, 1)), axis=3)  # a sum that keeps the loop's layout
            finish_in_pieces(
                shaped, bias, y, sums, arrived, num_rows, tile, steps, depth, PIECES, OUT, ROWS, ROW_TILES, WARPS, 16,
                MOST, HAS_BIAS,
            )  # fmt: skip
            total = tl.zeros((WARPS * 16, ROWS), tl.float32)
        packed, byte, value = next_packed, next_byte, next_value


@triton.jit
def _block(x, x_stride, first_row, part, num_rows, ROWS: tl.constexpr):
    """A block of x, (rows, 64)."""
    row, column = first_row + tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    return tl.load(x + row.to(tl.int64) * x_stride + (part * 64 + column), mask=row < num_rows, other=0.0)
