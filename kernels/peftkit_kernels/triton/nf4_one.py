"""A product of NF4 weights with a single row of x, without tensor cores: decoding is all that it does.

A thread takes 16 bytes of codes, half a block, of each of several output features, all loads before the first use. The
32 inputs that belong to them stay in its registers as float32 for all of those features.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from peftkit_kernels.triton.nf4_decode import scale, word_levels


@triton.jit
def one(
    x,
    code,
    absmax,
    absmax_code,
    absmax_scale,
    absmax_offset,
    bias,
    y,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    OUTS: tl.constexpr,
    HALVES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """OUTS outputs; HALVES half blocks of 32 inputs at a time, summed in a fixed order."""
    halves: tl.constexpr = IN // 32
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    weight_row = tl.minimum(out, OUT - 1)  # a ragged tile reads the last row again: no masks
    row_code = code + weight_row.to(tl.int64)[:, None] * (IN // 8)
    pair = tl.arange(0, OUTS * HALVES)  # flat, so that threads lie along half blocks
    pair_row = tl.minimum(tl.program_id(0) * OUTS + pair // HALVES, OUT - 1)
    total = tl.zeros((OUTS, HALVES), tl.float32)
    for start in tl.range(0, halves, HALVES, num_stages=STAGES):
        word = start * 4 + tl.arange(0, HALVES * 4)
        if halves % HALVES:
            packed = tl.load(row_code + word[None, :], mask=(word < halves * 4)[None, :], other=0)
        else:
            packed = tl.load(row_code + word[None, :])
        packed = tl.reshape(packed, (OUTS, HALVES, 4))
        block = pair_row * (IN // 64) + tl.minimum(start + pair % HALVES, halves - 1) // 2
        factor = tl.reshape(scale(absmax, absmax_code, absmax_scale, absmax_offset, block), (OUTS, HALVES))
        place = start + tl.arange(0, HALVES)
        total += factor * _half_sums(word_levels(packed, ON_GPU), x, place, place < halves)
    value = tl.sum(total, axis=1)
    if HAS_BIAS:
        value += tl.load(bias + weight_row).to(tl.float32)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=out < OUT)


@triton.jit
def _half_sums(levels, x, place, inside):
    """Levels times inputs, summed over each half block: (outputs, half blocks)."""
    if x.dtype.element_ty == tl.float32:
        total = levels[0] * _words(x + place * 32, 8, inside)
        for i in tl.static_range(1, 8):
            total += levels[i] * _words(x + place * 32 + i, 8, inside)
    else:  # four inputs in 64 bits
        quads = x.to(tl.pointer_type(tl.uint64), bitcast=True) + place * 8
        first, second = _words(quads, 2, inside), _words(quads + 1, 2, inside)
        total = levels[0] * _input(first, 0, x.dtype.element_ty)
        for i in tl.static_range(1, 8):
            total += levels[i] * _input(first if i < 4 else second, i % 4, x.dtype.element_ty)
    return tl.sum(total, axis=2)


@triton.jit
def _words(at, step: tl.constexpr, inside):
    """What belongs to each of four words: (1, half blocks, 4), all four in one thread."""
    even = tl.join(tl.load(at, mask=inside, other=0), tl.load(at + 2 * step, mask=inside, other=0))
    odd = tl.join(tl.load(at + step, mask=inside, other=0), tl.load(at + 3 * step, mask=inside, other=0))
    return tl.reshape(tl.join(even, odd), (1, at.shape[0], 4))


@triton.jit
def _input(quad, i: tl.constexpr, dtype: tl.constexpr):
    return ((quad >> (16 * i)) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
