"""Decoding NF4: scales from their 8-bit codes, and levels by byte permutes and warp shuffles.

The eight codes of a 32-bit word are looked up together. A byte permute finds one byte of each level among eight, so two
permutes and a third that chooses between them give one byte plane of four weights. Or a lane of the warp holds each
level, and a code is the lane to shuffle it from.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from peftkit_kernels.reference import NF4

_LEVELS = tl.constexpr(NF4)


@triton.jit
def scale(absmax, absmax_code, absmax_scale, absmax_offset, block, OFFSETS: tl.constexpr = False):
    """The float32 scales of blocks, from their 8-bit codes. OFFSETS: there is an offset for each scale's scale."""
    value = tl.load(absmax_code + tl.load(absmax + block).to(tl.int32))
    if OFFSETS:
        absmax_offset += block // 256
    return value * tl.load(absmax_scale + block // 256) + tl.load(absmax_offset)


@triton.jit
def level(nibble):
    """NF4's levels in float32, by selection: the plain path of what follows."""
    value = tl.full(nibble.shape, _LEVELS[0], tl.float32)
    for code in tl.static_range(1, 16):
        value = tl.where(nibble == code, _LEVELS[code], value)
    return value


@triton.jit
def word_levels(word, SHUFFLE: tl.constexpr):
    """Float32 levels of the eight codes of 32-bit words, in the order of their weights.

    Lanes l and l + 16 hold level l, so bits above a code don't matter.
    """
    if SHUFFLE:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        levels = tl.inline_asm_elementwise(
            _WORD, _WORD_REGISTERS, [word, level(lane & 15)], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    else:
        levels = (
            level((word >> 4) & 15),
            level(word & 15),
            level((word >> 12) & 15),
            level((word >> 8) & 15),
            level((word >> 20) & 15),
            level((word >> 16) & 15),
            level((word >> 28) & 15),
            level((word >> 24) & 15),
        )
    return levels


@triton.jit
def select_levels(packed, dtype: tl.constexpr):
    """Four tensors like `packed`, the units of a block: the q-th has the q-th pair of weights of each two units."""
    units = packed.to(tl.int32)
    first, second = tl.split(tl.reshape(units, (units.shape[0], 8, 2)))
    return (
        _byte_levels(first & 255, dtype),
        _byte_levels((first >> 8) & 255, dtype),
        _byte_levels(second & 255, dtype),
        _byte_levels((second >> 8) & 255, dtype),
    )


@triton.jit
def _byte_levels(byte, dtype: tl.constexpr):
    return tl.interleave(level(byte >> 4), level(byte & 15)).to(dtype)


@triton.jit
def permute_levels(packed, dtype: tl.constexpr):
    """The same for 16-bit levels. Two neighbours along a row are one register in any layout that products take."""
    if dtype == tl.float16:
        levels = tl.inline_asm_elementwise(
            _PERMUTE_FP16,
            _PERMUTE_REGISTERS,
            [packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        levels = tl.inline_asm_elementwise(
            _PERMUTE_BF16,
            _PERMUTE_REGISTERS,
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return levels


def _word_asm() -> str:
    lines = [".reg .b32 lane;"]
    for weight in range(8):
        shift = 8 * (weight // 2) + (0 if weight % 2 else 4)
        lines += [f"shr.u32 lane, $8, {shift};", f"shfl.sync.idx.b32 ${weight}, $9, lane, 31, 0xffffffff;"]
    return "{ " + " ".join(lines) + " }"


def level_words(dtype: torch.dtype) -> list[str]:
    """NF4's 16 levels in a 16-bit dtype as eight words: four of their low bytes, then four of their high ones."""
    with _disable_current_modes():  # the first use may be a rehearsal on tensors without data
        table = torch.tensor(NF4, dtype=torch.float32).to(dtype).view(torch.uint8).view(16, 2).T.contiguous()
        return [f"0x{word & 0xFFFFFFFF:08x}" for word in table.view(torch.int32).flatten().tolist()]


def _permute_asm(dtype: torch.dtype) -> str:
    """Register $q takes the levels of byte q of $4, the high nibble's first.

    Two bytes by permutes, two by shuffles from the lane that holds a level: integer units and shuffles work at the
    same time. The tables don't depend on $4 and leave the loop; a zero that ptxas
    can't see through keeps them out of uniform registers, from which each permute would first have to copy them.
    """
    words = level_words(dtype)
    look_up = [
        "prmt.b32 below, t0, t1, index;",
        "prmt.b32 above, t2, t3, index;",
        "prmt.b32 low, below, above, choice;",
        "prmt.b32 below, t4, t5, index;",
        "prmt.b32 above, t6, t7, index;",
        "prmt.b32 high, below, above, choice;",
    ]
    lines = [
        ".reg .b32 lane, zero, index, choice, below, above, low, high, level;",
        ".reg .b32 t<8>;",
        "mov.u32 lane, %laneid;",
        "mov.u32 zero, %nsmid;",
        "shr.u32 zero, zero, 24;",
        "and.b32 zero, zero, lane;",
        *(f"or.b32 t{i}, zero, {word};" for i, word in enumerate(words)),
        "and.b32 index, lane, 7;",
        "shr.u32 choice, lane, 1;",
        "and.b32 choice, choice, 4;",
        *look_up,
        "prmt.b32 level, low, high, 0x4040;",
        "and.b32 index, $4, 0x7777;",  # place among eight
        "shr.u32 choice, $4, 1;",
        "lop3.b32 choice, choice, 0x4444, 0x3210, 0xea;",  # byte i of the lower eight, or of the upper
        *look_up,
        "prmt.b32 $0, low, high, 0x4051;",
        "prmt.b32 $1, low, high, 0x6273;",
    ]
    for byte in (2, 3):
        for half, shift in (("low", 8 * byte + 4), ("high", 8 * byte)):
            lines += [f"shr.u32 index, $4, {shift};", f"shfl.sync.idx.b32 {half}, level, index, 31, 0xffffffff;"]
        lines += [f"prmt.b32 ${byte}, low, high, 0x5410;"]
    return "{ " + " ".join(lines) + " }"


_WORD = tl.constexpr(_word_asm())
_WORD_REGISTERS = tl.constexpr(",".join(["=&f"] * 8 + ["r", "f"]))
_PERMUTE_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r")
_PERMUTE_FP16 = tl.constexpr(_permute_asm(torch.float16))
_PERMUTE_BF16 = tl.constexpr(_permute_asm(torch.bfloat16))
