"""NF4 levels from a table in shared memory: a byte of codes is one look-up of two 16-bit levels.

The table has each of its 256 entries once for every lane of a warp, in that lane's own bank, so that no two lanes ever
wait for one another. Triton has no such table: the first of these pieces of assembly declares and fills it and gives
its address, the others read it there, one byte product (the address) and one load for two weights.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from peftkit_kernels.triton.nf4_decode import level, level_words


@triton.jit
def fill_levels(dtype: tl.constexpr):
    """Fills the program's table of levels, and gives the address of this lane's column of it."""
    if dtype == tl.float16:
        column = tl.inline_asm_elementwise(_FILL_FP16, "=&r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        column = tl.inline_asm_elementwise(_FILL_BF16, "=&r", [], dtype=tl.int32, is_pure=False, pack=1)
    return column


@triton.jit
def fill_scales(absmax_code, column, TABLE: tl.constexpr):
    """Fills the table of scales and waits for all of the program's threads; gives `column`, and the scales' address."""
    addresses = (column, 0)
    if TABLE:
        addresses = tl.inline_asm_elementwise(
            _FILL_SCALES, "=&r,=&r,r,l", [column, absmax_code], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    return addresses


@triton.jit
def settle(column, TABLE: tl.constexpr):
    """Waits for all of the program's threads to have filled the table of levels; gives `column`."""
    if TABLE:
        column = tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, $1;", "=r,r", [column], dtype=tl.int32, is_pure=False, pack=1
        )
    return column


@triton.jit
def pair_levels(units, column, dtype: tl.constexpr, TABLE: tl.constexpr):
    """Four tensors like `units` (…, 16-bit units): the q-th has the q-th pair of weights of each two units."""
    if not TABLE:
        codes = units.to(tl.int32)
        first, second = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1], codes.shape[2] // 2, 2)))
        levels = (_two(first, dtype), _two(first >> 8, dtype), _two(second, dtype), _two(second >> 8, dtype))
    elif dtype == tl.float16:
        levels = tl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_REGISTERS, [units, column], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )
    else:
        levels = tl.inline_asm_elementwise(
            _LOOK_UP, _LOOK_UP_REGISTERS, [units, column], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    return levels


@triton.jit
def scaled_levels(units, factor, column, dtype: tl.constexpr, TABLE: tl.constexpr):
    """The same times `factor`, which is of the levels' dtype and the same for both of two units; units in two dims."""
    if not TABLE:
        shape: tl.constexpr = units.shape
        w0, w1, w2, w3 = pair_levels(tl.reshape(units, (1, shape[0], shape[1])), column, dtype, TABLE)
        levels = (
            tl.reshape(w0, shape) * factor,
            tl.reshape(w1, shape) * factor,
            tl.reshape(w2, shape) * factor,
            tl.reshape(w3, shape) * factor,
        )
    elif dtype == tl.float16:
        levels = tl.inline_asm_elementwise(
            _SCALED_FP16, _SCALED_REGISTERS, [units, factor, column], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )
    else:
        levels = tl.inline_asm_elementwise(
            _SCALED_BF16, _SCALED_REGISTERS, [units, factor, column], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    return levels


@triton.jit
def _two(byte, dtype: tl.constexpr):
    return tl.interleave(level((byte >> 4) & 15), level(byte & 15)).to(dtype)


@triton.jit
def scale_code(byte, scales, absmax_code, TABLE: tl.constexpr):
    """The float32 that an 8-bit code of a scale stands for."""
    if TABLE:
        value = tl.inline_asm_elementwise(_SCALE, "=f,r,r", [byte, scales], dtype=tl.float32, is_pure=True, pack=1)
    else:
        value = tl.load(absmax_code + byte)
    return value


def _fill_asm(dtype: torch.dtype) -> str:
    words = level_words(dtype)
    lines = [
        ".shared .align 128 .b32 nf4_levels[8192];",
        ".reg .b32 entry, threads, step, at, index, choice, below, above, low, high, value;",
        ".reg .b32 t<8>;",
        ".reg .pred more;",
        *(f"mov.u32 t{i}, {word};" for i, word in enumerate(words)),
        "mov.u32 threads, %ntid.x;",
        "mov.u32 entry, %tid.x;",
        "mov.u32 at, nf4_levels;",
        "mad.lo.u32 at, entry, 16, at;",  # eight threads fill an entry's 128 bytes
        "shr.u32 entry, entry, 3;",
        "shr.u32 step, threads, 3;",
        "LEVELS:",
        "and.b32 index, entry, 0x77;",
        "shr.u32 choice, entry, 1;",
        "lop3.b32 choice, choice, 0x44, 0x3210, 0xea;",
        "prmt.b32 below, t0, t1, index;",
        "prmt.b32 above, t2, t3, index;",
        "prmt.b32 low, below, above, choice;",
        "prmt.b32 below, t4, t5, index;",
        "prmt.b32 above, t6, t7, index;",
        "prmt.b32 high, below, above, choice;",
        "prmt.b32 value, low, high, 0x4051;",  # the high nibble is the first weight
        "st.shared.v4.b32 [at], {value, value, value, value};",
        "mad.lo.u32 at, threads, 16, at;",
        "add.u32 entry, entry, step;",
        "setp.lt.u32 more, entry, 256;",
        "@more bra LEVELS;",
        "mov.u32 value, %laneid;",
        "mov.u32 at, nf4_levels;",
        "mad.lo.u32 $0, value, 4, at;",
    ]
    return "{ " + " ".join(lines) + " }"


def _fill_scales_asm() -> str:
    lines = [
        ".shared .align 128 .b32 nf4_scales[2048];",
        ".reg .b32 entry, threads, at, value;",
        ".reg .b64 source;",
        ".reg .pred filled;",
        "mov.u32 threads, %ntid.x;",
        "mov.u32 entry, %tid.x;",
        "mov.u32 at, nf4_scales;",
        "mad.lo.u32 at, entry, 32, at;",
        "mad.wide.u32 source, entry, 4, $3;",
        "SCALES:",  # a program may have more threads than entries
        "setp.ge.u32 filled, entry, 256;",
        "@filled bra FILLED;",
        "ld.global.b32 value, [source];",
        "st.shared.v4.b32 [at], {value, value, value, value};",
        "st.shared.v4.b32 [at+16], {value, value, value, value};",
        "mad.lo.u32 at, threads, 32, at;",
        "mad.wide.u32 source, threads, 4, source;",
        "add.u32 entry, entry, threads;",
        "bra SCALES;",
        "FILLED:",
        "bar.sync 0;",
        "mov.u32 $0, $2;",
        "mov.u32 value, %laneid;",
        "and.b32 value, value, 28;",  # the lanes of an output have a bank of their own
        "mov.u32 $1, nf4_scales;",
        "add.u32 $1, $1, value;",
    ]
    return "{ " + " ".join(lines) + " }"


def _look_up_asm() -> str:
    lines = [".reg .b32 at<4>;"]
    lines += [f"dp4a.u32.u32 at{q}, $4, {0x80 << 8 * q:#010x}, $5;" for q in range(4)]
    lines += [f"ld.shared.b32 ${q}, [at{q}];" for q in range(4)]
    return "{ " + " ".join(lines) + " }"


def _scaled_asm(kind: str) -> str:
    lines = [".reg .b32 at<4>, value<4>;"]
    lines += [f"dp4a.u32.u32 at{q}, $4, {0x80 << 8 * q:#010x}, $6;" for q in range(4)]
    lines += [f"ld.shared.b32 value{q}, [at{q}];" for q in range(4)]
    lines += [f"mul.rn.{kind} ${q}, value{q}, $5;" for q in range(4)]
    return "{ " + " ".join(lines) + " }"


_FILL_SCALES = tl.constexpr(_fill_scales_asm())
_FILL_FP16 = tl.constexpr(_fill_asm(torch.float16))
_FILL_BF16 = tl.constexpr(_fill_asm(torch.bfloat16))
_LOOK_UP_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
_LOOK_UP = tl.constexpr(_look_up_asm())
_SCALED_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r")
_SCALED_FP16 = tl.constexpr(_scaled_asm("f16x2"))
_SCALED_BF16 = tl.constexpr(_scaled_asm("bf16x2"))
_SCALE = tl.constexpr("{ .reg .b32 at; mad.lo.u32 at, $1, 32, $2; ld.shared.f32 $0, [at]; }")
