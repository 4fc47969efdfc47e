"""A product of NF4 weights with a few rows of x, in steps of some outputs × one or two blocks of inputs.

Everything goes from memory straight to the registers where the tensor cores want it, without a barrier. A lane takes 8
or 16 bytes of an output's codes and its three neighbours what follows them, as a tall operand of 16 × 16 lies in
registers if weights may come in another order; and x is loaded in that order, each lane what belongs to its codes. So
the permutations below move nothing: they say which weight a register's place in the product stands for. In another
layout than the one that they are made for they would be as correct, and slow.

Of two blocks (SPAN 2) each has every other column of the product, where x is zero for the other block's weights: a
scale belongs to the sum over one block.

The steps of all tiles are one row, cut evenly over programs that stay. Where several have a share of a tile, each
leaves its sum in memory, and the one that finishes the tile, by an atomic counter, adds them up in their order.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from peftkit_kernels.triton.dependent import wait_turn
from peftkit_kernels.triton.nf4_table import fill_levels, fill_scales, pair_levels, scale_code


@triton.jit(do_not_specialize=["num_rows"])
def few_kernel(
    x, code, absmax, absmax_code, absmax_scale, absmax_offset, bias, y, sums, arrived, num_rows, x_stride,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, OUTS: tl.constexpr, DEEP: tl.constexpr, EACH: tl.constexpr, X_AHEAD: tl.constexpr,
    PIECES: tl.constexpr, MOST: tl.constexpr, OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, TABLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile has OUTS outputs for each of WARPS / DEEP warps and ROWS rows of x; a step, SPAN blocks of it for each of
    DEEP warps. x is read through L1. Codes and scales' scales are loaded a step before their use, with X_AHEAD x too;
    scales' codes for EACH steps at once.

    MOST: programs that share a tile, at most; 0: programs have whole tiles.
    """
    tall: tl.constexpr = WARPS // DEEP
    depth: tl.constexpr = IN // 64 // SPAN // DEEP
    tiles: tl.constexpr = (OUT + tall * OUTS - 1) // (tall * OUTS) * ROW_TILES
    first, last = share(tiles, depth, MOST)
    packed = codes(code, first // depth // ROW_TILES, first % depth, OUT, IN, SPAN, WARPS, OUTS, DEEP)
    word = scale_codes(absmax, 0, first // depth // ROW_TILES, first % depth, 0, OUT, IN, SPAN, WARPS, OUTS, DEEP, EACH)
    outer = nested(absmax_scale, 0.0, first // depth // ROW_TILES, first % depth, 0, OUT, IN, SPAN, WARPS, OUTS, DEEP)
    offset = first_offset(
        absmax_offset, first // depth // ROW_TILES, first % depth, OUT, IN, SPAN, WARPS, OUTS, DEEP, OFFSETS
    )
    column, scales = tables(x, absmax_code, TABLE)
    if DEPENDENT:
        wait_turn()
    inputs = _inputs(
        x, x_stride, first // depth % ROW_TILES * ROWS, first % depth, num_rows, depth, ROWS, SPAN, WARPS, DEEP
    )
    total = tl.zeros((WARPS, OUTS, ROWS * SPAN), tl.float32)
    for step in range(first, last):
        tile, part, ahead = step // depth, step % depth, tl.minimum(step + 1, last - 1)
        if not X_AHEAD:
            inputs = _inputs(x, x_stride, tile % ROW_TILES * ROWS, part, num_rows, depth, ROWS, SPAN, WARPS, DEEP)
        next_packed = codes(code, ahead // depth // ROW_TILES, ahead % depth, OUT, IN, SPAN, WARPS, OUTS, DEEP)
        next_word = scale_codes(
            absmax, word, ahead // depth // ROW_TILES, ahead % depth, ahead % depth, OUT, IN, SPAN, WARPS, OUTS, DEEP,
            EACH,
        )  # fmt: skip
        next_outer = nested(
            absmax_scale, outer, ahead // depth // ROW_TILES, ahead % depth, ahead % depth, OUT, IN, SPAN, WARPS, OUTS,
            DEEP,
        )  # fmt: skip
        if X_AHEAD:
            next_inputs = _inputs(
                x, x_stride, ahead // depth % ROW_TILES * ROWS, ahead % depth, num_rows, depth, ROWS, SPAN, WARPS, DEEP
            )
        else:
            next_inputs = inputs
        w0, w1, w2, w3 = pair_levels(packed, column, x.dtype.element_ty, TABLE)
        weights = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        weights = tl.reshape(weights, (WARPS, OUTS, 2 * SPAN, 4, 2, 2, 2))  # …, word, lane, i, q in two bits
        weights = tl.reshape(tl.permute(weights, (0, 1, 2, 5, 3, 6, 4)), (WARPS, OUTS, 64 * SPAN))
        product = tl.dot(weights, inputs, input_precision="ieee")
        byte = word
        offset = next_offset(absmax_offset, offset, tile // ROW_TILES, part, OUT, IN, SPAN, WARPS, OUTS, DEEP, OFFSETS)
        if EACH > 1:
            byte = word >> part % EACH * (8 * SPAN)
        total += product * factor(outer, byte, offset, scales, absmax_code, ROWS, SPAN, WARPS, OUTS, TABLE)
        if (part == depth - 1) | (step == last - 1):
            value = tl.sum(tl.reshape(total, (WARPS, OUTS, ROWS, SPAN)), axis=3)
            if DEEP > 1:
                value = tl.sum(tl.reshape(value, (DEEP, tall, OUTS, ROWS)), axis=0)
            finish_in_pieces(
                value, bias, y, sums, arrived, num_rows, tile, tiles * depth, depth, PIECES, OUT, ROWS, ROW_TILES, tall,
                OUTS, MOST, HAS_BIAS,
            )  # fmt: skip
            total = tl.zeros((WARPS, OUTS, ROWS * SPAN), tl.float32)
        packed, word = next_packed, next_word
        outer, inputs = next_outer, next_inputs


@triton.jit
def _inputs(
    x, x_stride, first_row, part, num_rows, depth: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """x of a step as the other operand, (warps, 64 × SPAN, columns)."""
    words: tl.constexpr = 2 * SPAN
    cols: tl.constexpr = ROWS * SPAN
    place, element = tl.arange(0, cols * WARPS * words)[:, None], tl.arange(0, 32)[None, :]
    column = place // (8 * WARPS * words) * 8 + place % 8
    word, lane = place // (8 * WARPS) % words, element // 8
    row = first_row + column // SPAN
    inside = row < num_rows
    if SPAN > 1:
        inside = inside & (lane * SPAN // 4 == column % SPAN)
    part += place // 8 % WARPS // (WARPS // DEEP) * depth
    at = x + row.to(tl.int64) * x_stride + (part * (64 * SPAN) + lane * (16 * SPAN) + word * 8 + element % 8)
    value = tl.load(tl.max_contiguous(at, [1, 8]), mask=tl.broadcast_to(inside, at.shape), other=0.0)
    value = tl.reshape(value, (cols // 8, words, WARPS, 8, 4, 2, 2, 2))  # …, lane, q in two bits, i
    return tl.reshape(tl.permute(value, (2, 1, 6, 4, 5, 7, 0, 3)), (WARPS, 64 * SPAN, cols))


@triton.jit
def share(tiles: tl.constexpr, depth: tl.constexpr, MOST: tl.constexpr):
    """The program's even share of the steps, of whole tiles with MOST 0."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if MOST == 0:
        first, last = program * tiles // num_programs * depth, (program + 1) * tiles // num_programs * depth
    else:
        first, last = program * (tiles * depth) // num_programs, (program + 1) * (tiles * depth) // num_programs
    return first, last


@triton.jit
def tables(x, absmax_code, TABLE: tl.constexpr):
    """Fills the tables of levels and of scales; where this lane's column of levels is, and where the scales are."""
    column = 0
    if TABLE:
        column = fill_levels(x.dtype.element_ty)
    return fill_scales(absmax_code, column, TABLE)


@triton.jit
def codes(
    code, tile, part, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Codes of a step as the tall operand, (warps, outputs, 16-bit units)."""
    unit, place = tl.arange(0, 16 * SPAN)[None, :], tl.arange(0, WARPS * OUTS)[:, None]
    out, group, run = _outs(tile, part, place, OUT, IN, SPAN, WARPS, OUTS, DEEP)
    if OUT * IN // 4 >= 1 << 31:
        out = out.to(tl.int64)
    at = code + out * (IN // 4) + (run * (16 * SPAN) + unit) + group * (IN // 4)
    packed = tl.load(tl.max_contiguous(at, [1, 4 * SPAN]))
    packed = tl.reshape(packed, (OUTS // 8, WARPS, 8, 4, 2 * SPAN, 2))  # …, lane, word, half a word
    return tl.reshape(tl.permute(packed, (1, 0, 2, 4, 3, 5)), (WARPS, OUTS, 16 * SPAN))


@triton.jit
def scale_codes(
    absmax, before, tile, part, turn, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, DEEP: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Scales' codes of EACH steps; those of the step `before` where `turn` isn't a multiple of EACH."""
    out, group, run = _outs(tile, part, tl.arange(0, WARPS * OUTS * 4) // 4, OUT, IN, SPAN, WARPS, OUTS, DEEP)
    each: tl.constexpr = SPAN * EACH
    if each == 1:
        at = absmax
    elif each == 2:
        at = absmax.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        at = absmax.to(tl.pointer_type(tl.uint32), bitcast=True)
    at += (out * (IN // 64 // each) + run // EACH) + group * (IN // 64 // each)
    if EACH == 1:
        word = tl.load(at)
    else:
        word = tl.load(at, mask=(out * 0 + turn) % EACH == 0, other=before)
    return word


@triton.jit
def _outs(
    tile, part, place, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Of (groups of 8 outputs × warps × 8 outputs): the output in two summands, and which SPAN blocks of it."""
    tall: tl.constexpr = WARPS // DEEP
    warp, group = place // 8 % WARPS, place // (8 * WARPS) * 8
    out = (tile * tall + warp % tall) * OUTS + place % 8
    if OUT % (tall * OUTS):  # a ragged tile reads the last row again: no masks
        out, group = tl.minimum(out + group, OUT - 1), group * 0
    return out, group, part + warp // tall * (IN // 64 // SPAN // DEEP)


@triton.jit
def nested(
    absmax_scale, before, tile, part, turn, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, OUTS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Scales of a step's scales; those of the step `before` where an output has but one and `turn` isn't 0."""
    at = absmax_scale + _groups(tile, part, OUT, IN, SPAN, WARPS, OUTS, DEEP)
    if 16384 % IN == 0:
        outer = tl.load(at, mask=turn + (tl.arange(0, WARPS * OUTS * 4) * 0) == 0, other=before)
    else:
        outer = tl.load(at)
    return outer


@triton.jit
def first_offset(
    absmax_offset, tile, part, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, DEEP: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """What is added to a tile's scales, for each output where OFFSETS."""
    if OFFSETS:
        offset = tl.load(absmax_offset + _groups(tile, part, OUT, IN, SPAN, WARPS, OUTS, DEEP))
    else:
        offset = tl.load(absmax_offset)
    return offset


@triton.jit
def next_offset(
    absmax_offset, offset, tile, part, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, DEEP: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """The same with a tile's first part, and what was so far elsewhere: an output's scales have one offset."""
    if OFFSETS:
        at = _groups(tile, part, OUT, IN, SPAN, WARPS, OUTS, DEEP)
        offset = tl.load(absmax_offset + at, mask=at * 0 + part == 0, other=offset)
    return offset


@triton.jit
def _groups(
    tile, part, OUT: tl.constexpr, IN: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr, OUTS: tl.constexpr,
    DEEP: tl.constexpr,
):  # fmt: skip
    """Which groups of 256 blocks a step's blocks are of."""
    out, group, run = _outs(tile, part, tl.arange(0, WARPS * OUTS * 4) // 4, OUT, IN, SPAN, WARPS, OUTS, DEEP)
    if IN % 2048 == 0:  # then eight outputs on are whole groups of 256 blocks on
        at = (out * (IN // 64) + run * SPAN >> 8) + (group * (IN // 64) >> 8)
    else:
        at = (out + group) * (IN // 64) + run * SPAN >> 8
    return at


@triton.jit
def factor(
    outer, byte, offset, scales, absmax_code, ROWS: tl.constexpr, SPAN: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Scales of a step's sums, (warps, outputs, columns)."""
    byte = byte.to(tl.int32)
    even = scale_code(byte & 255, scales, absmax_code, TABLE) * outer + offset
    odd = even
    if SPAN == 2:
        odd = scale_code(byte >> 8 & 255, scales, absmax_code, TABLE) * outer + offset
    value = tl.reshape(tl.join(even, odd), (OUTS // 8, WARPS, 8, 8))
    value = tl.reshape(tl.permute(value, (1, 0, 2, 3)), (WARPS, OUTS, 1, 8))
    value = tl.broadcast_to(value, (WARPS, OUTS, ROWS * SPAN // 8, 8))
    return tl.reshape(value, (WARPS, OUTS, ROWS * SPAN))


@triton.jit
def finish_in_pieces(
    value, bias, y, sums, arrived, num_rows, tile, steps: tl.constexpr, depth: tl.constexpr, PIECES: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr, OUTS: tl.constexpr,
    MOST: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A tile as a whole, or its rows in two halves, so that the way to memory takes less shared memory."""
    if PIECES == 2:
        lower, upper = tl.split(tl.permute(tl.reshape(value, (WARPS, OUTS, 2, ROWS // 2)), (0, 1, 3, 2)))
        finish(
            lower, bias, y, sums, arrived, num_rows, tile, steps, depth, 0, 2, OUT, ROWS // 2, ROW_TILES, WARPS, OUTS,
            MOST, HAS_BIAS,
        )  # fmt: skip
        finish(
            upper, bias, y, sums, arrived, num_rows, tile, steps, depth, 1, 2, OUT, ROWS // 2, ROW_TILES, WARPS, OUTS,
            MOST, HAS_BIAS,
        )  # fmt: skip
    else:
        finish(
            value, bias, y, sums, arrived, num_rows, tile, steps, depth, 0, 1, OUT, ROWS, ROW_TILES, WARPS, OUTS, MOST,
            HAS_BIAS,
        )  # fmt: skip


@triton.jit
def finish(
    value, bias, y, sums, arrived, num_rows, tile, steps: tl.constexpr, depth: tl.constexpr, piece: tl.constexpr,
    PIECES: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, ROW_TILES: tl.constexpr, WARPS: tl.constexpr,
    OUTS: tl.constexpr, MOST: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Stores outputs of one of PIECES of a tile, (warps, outputs, rows), or this program's share of their sums."""
    inside = tl.arange(0, WARPS)[:, None] * OUTS + tl.arange(0, OUTS)[None, :]
    out = (tile // ROW_TILES * (WARPS * OUTS) + inside)[:, :, None]
    column = tl.arange(0, ROWS)[None, None, :]
    row = (tile % ROW_TILES * PIECES + piece) * ROWS + column
    mask = (out < OUT) & (row < num_rows)
    finished = True
    if MOST:
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        first = ((tile * depth + 1) * num_programs - 1) // steps
        final = ((tile * depth + depth) * num_programs - 1) // steps
        finished = first == final
        if first != final:  # a program shares its first tile with those before it, its last with those behind
            at = sums + inside[:, :, None] + column * (WARPS * OUTS)
            slot = (program * 2 + (program == first).to(tl.int32)) * PIECES + piece
            tl.store(at + slot * (ROWS * WARPS * OUTS), value, mask=mask)
            tl.debug_barrier()  # every thread's stores before the one that counts
            if tl.atomic_add(arrived + tile * PIECES + piece, 1, sem="acq_rel") == final - first:
                tl.store(arrived + tile * PIECES + piece, 0)
                value = tl.zeros((WARPS, OUTS, ROWS), tl.float32)
                if MOST <= 8:
                    for ahead in tl.static_range(MOST):  # all on their way at once
                        other = first + ahead
                        slot = (other * 2 + (other == first).to(tl.int32)) * PIECES + piece
                        there = at + slot * (ROWS * WARPS * OUTS)
                        value += tl.load(
                            there, mask=mask & (column * 0 + other <= final), other=0.0, cache_modifier=".cg"
                        )
                else:
                    for other in range(first, final + 1):
                        slot = (other * 2 + (other == first).to(tl.int32)) * PIECES + piece
                        value += tl.load(at + slot * (ROWS * WARPS * OUTS), mask=mask, other=0.0, cache_modifier=".cg")
                finished = True
    if finished:
        if HAS_BIAS:
            value += tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)
        tl.store(y + row.to(tl.int64) * OUT + out, value.to(y.dtype.element_ty), mask=mask)
