"""A product of NF4 weights with some tens of rows of x, cut along the input, and the sum of the parts.

Half of the levels come by byte permutes, half by warp shuffles; a block is four products of depth 16.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from peftkit_kernels.triton.nf4_decode import permute_levels, scale, select_levels

_BLOCK = tl.constexpr(64)  # weights under one scale


@triton.jit(do_not_specialize=["num_rows"])
def parts_kernel(
    x,
    code,
    absmax,
    absmax_code,
    absmax_scale,
    absmax_offset,
    bias,
    sums,
    num_rows,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PERMUTE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """A tile of OUTS × ROWS over one of SPLITS parts of the input: weights are the tensor cores' tall operand.

    Codes are read as 16-bit units, 16 a block. Of the eight weights in two units, the q-th pair goes to the q-th of
    four products of depth 16, and x is dealt out likewise: nothing is interleaved, and codes go from shared memory to
    the registers of the tensor cores' layout as they are.
    """
    blocks: tl.constexpr = IN // _BLOCK
    part: tl.constexpr = ((blocks + SPLITS - 1) // SPLITS + UNROLL - 1) // UNROLL * UNROLL
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    weight_row = tl.minimum(out, OUT - 1).to(tl.int64)  # a ragged tile reads the last row again: no masks
    code_at = code + weight_row[:, None] * (IN // 4) + tl.arange(0, 16)[None, :]
    x_at = x + row[:, None].to(tl.int64) * x_stride + tl.arange(0, _BLOCK)[None, :]
    first_block = (weight_row * blocks).to(tl.int32)
    total = tl.zeros((OUTS, ROWS), tl.float32)
    first = tl.program_id(1) * part
    for start in range(first, tl.minimum(first + part, blocks), UNROLL):
        for ahead in tl.static_range(UNROLL):
            block = start + ahead
            if blocks % UNROLL != 0:
                block = tl.minimum(block, blocks - 1)
            packed = tl.load(code_at + block * 16)
            value = tl.load(x_at + block * _BLOCK, mask=(row < num_rows)[:, None], other=0.0)
            factor = scale(absmax, absmax_code, absmax_scale, absmax_offset, first_block + block, OFFSETS)
            if blocks % UNROLL != 0:
                factor = tl.where(start + ahead < blocks, factor, 0.0)
            if PERMUTE:
                w0, w1, w2, w3 = permute_levels(packed, x.dtype.element_ty)
            else:
                w0, w1, w2, w3 = select_levels(packed, x.dtype.element_ty)
            x0, x1, x2, x3 = _deal(value, ROWS)
            product = tl.dot(w0, x0, input_precision="ieee")
            product = tl.dot(w1, x1, product, input_precision="ieee")
            product = tl.dot(w2, x2, product, input_precision="ieee")
            product = tl.dot(w3, x3, product, input_precision="ieee")
            total += product * factor[:, None]
    if HAS_BIAS and SPLITS == 1:
        total += tl.load(bias + weight_row).to(tl.float32)[:, None]
    at = sums + tl.program_id(1).to(tl.int64) * num_rows * OUT + row[None, :] * OUT + out[:, None]
    tl.store(at, total.to(sums.dtype.element_ty), mask=(out < OUT)[:, None] & (row < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    sums, bias, y, num_rows, OUT: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the parts of a row in their order."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = out < OUT
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * num_rows + row) * OUT + out, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + out, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * OUT + out, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _deal(value, ROWS: tl.constexpr):
    """A block of x, (ROWS, 64), as the other operands (16, ROWS) of the four products."""
    pairs = tl.permute(tl.reshape(value, (ROWS, 8, 2, 2, 2)), (0, 1, 4, 2, 3))  # u, i, and q in two bits
    even, odd = tl.split(pairs)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return (
        tl.trans(tl.reshape(x0, (ROWS, 16))),
        tl.trans(tl.reshape(x1, (ROWS, 16))),
        tl.trans(tl.reshape(x2, (ROWS, 16))),
        tl.trans(tl.reshape(x3, (ROWS, 16))),
    )
