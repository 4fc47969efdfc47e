"""A product of NF4 weights with a single row of x, without tensor cores: decoding is all that it does.

A thread takes 16 bytes of codes, half a block, of each of several output features, all loads before the first use. The
32 inputs that belong to them stay in its registers as float32 for all of those features. Programs stay, and take one
tile of features after another.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from peftkit_kernels.triton.nf4_decode import word_levels


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
    HAS_BIAS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Tiles of OUTS outputs in turn; HALVES half blocks of 32 inputs at a time, summed in a fixed order.

    The next step's codes are on their way while a step's are decoded.
    """
    halves: tl.constexpr = IN // 32
    cuts: tl.constexpr = (halves + HALVES - 1) // HALVES
    tiles: tl.constexpr = (OUT + OUTS - 1) // OUTS
    tile, num_programs = tl.program_id(0), tl.num_programs(0)
    num_steps = (tiles - tile + num_programs - 1) // num_programs * cuts
    place = tl.arange(0, HALVES)
    packed, byte = _codes(code, absmax, tile, 0, OUT, IN, OUTS, HALVES)
    inputs = _inputs(x, place, place < halves)
    total = tl.zeros((OUTS, HALVES), tl.float32)
    for step in range(num_steps):
        ahead = tl.minimum(step + 1, num_steps - 1)
        next_tile = tl.program_id(0) + ahead // cuts * num_programs
        next_packed, next_byte = _codes(code, absmax, next_tile, ahead % cuts * HALVES, OUT, IN, OUTS, HALVES)
        start = step % cuts * HALVES
        block = _blocks(tile, start, OUT, IN, OUTS, HALVES)
        factor = tl.load(absmax_code + byte.to(tl.int32)) * tl.load(absmax_scale + block // 256)
        factor = tl.reshape(factor + tl.load(absmax_offset), (OUTS, HALVES))
        levels = word_levels(packed, ON_GPU)
        if cuts > 1:
            inputs = _inputs(x, start + place, start + place < halves)
        products = levels[0] * inputs[0]
        for i in tl.static_range(1, 8):
            products += levels[i] * inputs[i]
        total += factor * tl.sum(products, axis=2)
        if step % cuts == cuts - 1:
            out = tile * OUTS + tl.arange(0, OUTS)
            value = tl.sum(total, axis=1)
            if HAS_BIAS:
                value += tl.load(bias + tl.minimum(out, OUT - 1)).to(tl.float32)
            tl.store(y + out, value.to(y.dtype.element_ty), mask=out < OUT)
            total = tl.zeros((OUTS, HALVES), tl.float32)
        tile, packed, byte = next_tile, next_packed, next_byte


@triton.jit
def _codes(code, absmax, tile, start, OUT: tl.constexpr, IN: tl.constexpr, OUTS: tl.constexpr, HALVES: tl.constexpr):
    """Codes (outputs, half blocks, 4 words) of a step, and its scales' codes, flat."""
    row = tl.minimum(tile * OUTS + tl.arange(0, OUTS), OUT - 1)  # a ragged tile reads the last row again: no masks
    word = start * 4 + tl.arange(0, HALVES * 4)
    at = code + row.to(tl.int64)[:, None] * (IN // 8) + word[None, :]
    if IN // 32 % HALVES:
        packed = tl.load(at, mask=(word < IN // 8)[None, :], other=0)
    else:
        packed = tl.load(at)
    byte = tl.load(absmax + _blocks(tile, start, OUT, IN, OUTS, HALVES))
    return tl.reshape(packed, (OUTS, HALVES, 4)), byte


@triton.jit
def _blocks(tile, start, OUT: tl.constexpr, IN: tl.constexpr, OUTS: tl.constexpr, HALVES: tl.constexpr):
    """The block of each half block of a step; flat, so that threads lie along half blocks."""
    pair = tl.arange(0, OUTS * HALVES)
    row = tl.minimum(tile * OUTS + pair // HALVES, OUT - 1)
    return row * (IN // 64) + tl.minimum(start + pair % HALVES, IN // 32 - 1) // 2


@triton.jit
def _inputs(x, place, inside):
    """The inputs of half blocks as float32: eight times (1, half blocks, 4), the i-th of each of four words."""
    if x.dtype.element_ty == tl.float32:
        at = x + place * 32
        inputs = (
            _words(at, 8, inside),
            _words(at + 1, 8, inside),
            _words(at + 2, 8, inside),
            _words(at + 3, 8, inside),
            _words(at + 4, 8, inside),
            _words(at + 5, 8, inside),
            _words(at + 6, 8, inside),
            _words(at + 7, 8, inside),
        )
    else:  # four inputs in 64 bits
        quads = x.to(tl.pointer_type(tl.uint64), bitcast=True) + place * 8
        first, second = _words(quads, 2, inside), _words(quads + 1, 2, inside)
        inputs = (
            _input(first, 0, x.dtype.element_ty),
            _input(first, 1, x.dtype.element_ty),
            _input(first, 2, x.dtype.element_ty),
            _input(first, 3, x.dtype.element_ty),
            _input(second, 0, x.dtype.element_ty),
            _input(second, 1, x.dtype.element_ty),
            _input(second, 2, x.dtype.element_ty),
            _input(second, 3, x.dtype.element_ty),
        )
    return inputs


@triton.jit
def _words(at, step: tl.constexpr, inside):
    """What belongs to each of four words: (1, half blocks, 4), all four in one thread."""
    even = tl.join(tl.load(at, mask=inside, other=0), tl.load(at + 2 * step, mask=inside, other=0))
    odd = tl.join(tl.load(at + step, mask=inside, other=0), tl.load(at + 3 * step, mask=inside, other=0))
    return tl.reshape(tl.join(even, odd), (1, at.shape[0], 4))


@triton.jit
def _input(quad, i: tl.constexpr, dtype: tl.constexpr):
    return ((quad >> (16 * i)) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
