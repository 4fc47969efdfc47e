"""NF4 in bitsandbytes' layout: dequantised in one pass, and multiplied by without ever being dequantised in memory.

`nf4_linear` is bound by the arithmetic of decoding before it is by memory. On a GPU the eight codes of a 32-bit word
are looked up together. For four of them a byte permute finds one byte of each level among eight, so two permutes and a
third that chooses between them give one byte plane of four weights; for the other four a lane of the warp holds each
level, and a code is the lane to shuffle it from. A level's scale is applied to the sum over its block.
`nf4_dequantize` must round as float32 does and shuffles all.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels import reference
from peftkit_kernels.reference import NF4
from peftkit_kernels.triton.compile import Specimen

_LEVELS = tl.constexpr(NF4)
_BLOCK = tl.constexpr(64)  # weights under one scale


@dataclass(frozen=True, slots=True)
class Config:
    """How a product with NF4 weights is cut."""

    rows: int
    """Rows of x a program: the narrow side of its tensor-core tile."""
    outs: int
    """Output features a program."""
    unroll: int
    """Blocks of 64 inputs at a time."""
    num_warps: int
    num_stages: int


CONFIGS: Mapping[tuple[int, int], Config] = MappingProxyType(
    {
        (16, 8): Config(rows=16, outs=64, unroll=2, num_warps=2, num_stages=4),
        (32, 8): Config(rows=32, outs=64, unroll=2, num_warps=2, num_stages=4),
        (64, 8): Config(rows=64, outs=64, unroll=1, num_warps=4, num_stages=4),
        (16, 9): Config(rows=16, outs=64, unroll=2, num_warps=2, num_stages=4),
        (32, 9): Config(rows=32, outs=64, unroll=2, num_warps=2, num_stages=4),
        (64, 9): Config(rows=64, outs=64, unroll=2, num_warps=4, num_stages=4),
    }
)
"""(rows rounded up to a tile, major compute capability) → configuration. Newer cards take the newest one's."""

MAX_ROWS = 64
"""More rows than this go through dequantised weights and cuBLAS."""

_MULTIPROCESSORS: Mapping[int, int] = MappingProxyType({8: 108, 9: 132, 10: 148})
_override: list[Config] = []


def nf4_dequantize(
    code_X: Tensor,
    absmax_B: Tensor,
    absmax_code: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """See `peftkit_kernels.reference.nf4_dequantize`; the same bits."""
    weight_OI = torch.empty(shape, dtype=dtype, device=code_X.device)
    num_elements = weight_OI.numel()
    if num_elements:
        _dequantize[(triton.cdiv(num_elements, 64 * _DEQUANTIZE_BLOCKS),)](
            code_X.contiguous(),
            absmax_B.contiguous(),
            absmax_code.contiguous(),
            absmax_scale.contiguous(),
            absmax_offset,
            weight_OI,
            num_elements,
            code_X.numel(),
            absmax_B.numel(),
            BLOCKS=_DEQUANTIZE_BLOCKS,
            SHUFFLE=code_X.is_cuda,
            num_warps=4,
            enable_fp_fusion=False,  # a scale is rounded before the offset is added
        )
    return weight_OI


def nf4_linear(
    x_TI: Tensor,
    code_X: Tensor,
    absmax_B: Tensor,
    absmax_code: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    out_features: int,
    bias_O: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See `peftkit_kernels.reference.nf4_linear`. Up to `MAX_ROWS` rows, and whenever `deterministic`, the weights are
    decoded on the way; levels are rounded to x's dtype, scales and sums are float32."""
    num_rows, in_features = x_TI.shape
    if in_features % 64 or (num_rows > MAX_ROWS and not deterministic):
        quantised = (code_X, absmax_B, absmax_code, absmax_scale, absmax_offset)
        weight_OI = nf4_dequantize(*quantised, (out_features, in_features), x_TI.dtype)
        if deterministic:
            return reference.linear(x_TI, weight_OI, bias_O, deterministic=True)
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = torch.empty(num_rows, out_features, dtype=x_TI.dtype, device=x_TI.device)
    if not y_TO.numel():
        return y_TO
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    major = _major(x_TI.device)
    config = _config(MAX_ROWS if deterministic else num_rows, major)
    tiles = triton.cdiv(out_features, config.outs)
    num_splits = _splits(tiles * config.num_warps, in_features // 64, _MULTIPROCESSORS.get(major, 148))
    sums_STO = y_TO
    if num_splits > 1:
        sums_STO = torch.empty(num_splits, num_rows, out_features, dtype=torch.float32, device=x_TI.device)
    _linear[(tiles, num_splits, triton.cdiv(num_rows, config.rows))](
        x_TI,
        code_X.contiguous().view(torch.int16),
        absmax_B.contiguous(),
        absmax_code.contiguous(),
        absmax_scale.contiguous(),
        absmax_offset,
        y_TO if bias_O is None else bias_O,
        sums_STO,
        num_rows,
        x_TI.stride(0),
        OUT=out_features,
        IN=in_features,
        ROWS=config.rows,
        OUTS=config.outs,
        SPLITS=num_splits,
        UNROLL=config.unroll,
        HAS_BIAS=bias_O is not None,
        PERMUTE=x_TI.is_cuda and x_TI.dtype != torch.float32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        _add_splits[(num_rows, triton.cdiv(out_features, _ADD))](
            sums_STO,
            y_TO if bias_O is None else bias_O,
            y_TO,
            num_rows,
            OUT=out_features,
            SPLITS=num_splits,
            HAS_BIAS=bias_O is not None,
            BLOCK=_ADD,
            num_warps=4,
        )
    return y_TO


_DEQUANTIZE_BLOCKS = 64
_ADD = 512


@triton.jit
def _dequantize(
    code,
    absmax,
    absmax_code,
    absmax_scale,
    absmax_offset,
    weight,
    num_elements,
    num_bytes,
    num_blocks,
    BLOCKS: tl.constexpr,
    SHUFFLE: tl.constexpr,
):
    """Four bytes and eight weights a thread at a time: 16-byte stores that lie one after another."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    word = tl.arange(0, 8)[None, :, None]
    byte = block[:, None, None] * 32 + word * 4 + tl.arange(0, 4)[None, None, :]
    packed = tl.load(code + byte, mask=byte < num_bytes, other=0)
    last = tl.minimum(block, num_blocks - 1)  # behind the last block nothing is stored
    scale = _scale(absmax, absmax_code, absmax_scale, absmax_offset, last)[:, None, None]
    if SHUFFLE:
        high, low = _shuffle_levels(packed)
    else:
        high, low = _level(packed >> 4), _level(packed & 15)
    value = tl.interleave(high * scale, low * scale).to(weight.dtype.element_ty)
    element = block[:, None, None] * _BLOCK + word * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(weight + element, value, mask=element < num_elements)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
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
            scale = _scale(absmax, absmax_code, absmax_scale, absmax_offset, first_block + block)
            if blocks % UNROLL != 0:
                scale = tl.where(start + ahead < blocks, scale, 0.0)
            if PERMUTE:
                w0, w1, w2, w3 = _permute_levels(packed, x.dtype.element_ty)
            else:
                w0, w1, w2, w3 = _select_levels(packed, x.dtype.element_ty)
            x0, x1, x2, x3 = _deal(value, ROWS)
            product = tl.dot(w0, x0, input_precision="ieee")
            product = tl.dot(w1, x1, product, input_precision="ieee")
            product = tl.dot(w2, x2, product, input_precision="ieee")
            product = tl.dot(w3, x3, product, input_precision="ieee")
            total += product * scale[:, None]
    if HAS_BIAS and SPLITS == 1:
        total += tl.load(bias + weight_row).to(tl.float32)[:, None]
    at = sums + tl.program_id(1).to(tl.int64) * num_rows * OUT + row[None, :] * OUT + out[:, None]
    tl.store(at, total.to(sums.dtype.element_ty), mask=(out < OUT)[:, None] & (row < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
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
def _scale(absmax, absmax_code, absmax_scale, absmax_offset, block):
    """The float32 scales of blocks, from their 8-bit codes."""
    value = tl.load(absmax_code + tl.load(absmax + block).to(tl.int32))
    return value * tl.load(absmax_scale + block // 256) + tl.load(absmax_offset)


@triton.jit
def _level(nibble):
    """NF4's levels in float32, by selection: the plain path of what follows."""
    value = tl.full(nibble.shape, _LEVELS[0], tl.float32)
    for code in tl.static_range(1, 16):
        value = tl.where(nibble == code, _LEVELS[code], value)
    return value


@triton.jit
def _shuffle_levels(packed):
    """Float32 levels of the high and the low nibbles; lanes l and l + 16 hold level l, so bits above a nibble don't
    matter."""
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return tl.inline_asm_elementwise(
        _SHUFFLE, _SHUFFLE_REGISTERS, [packed, _level(lane & 15)], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
    )


@triton.jit
def _select_levels(packed, dtype: tl.constexpr):
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
    return tl.interleave(_level(byte >> 4), _level(byte & 15)).to(dtype)


@triton.jit
def _permute_levels(packed, dtype: tl.constexpr):
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


def _shuffle_asm() -> str:
    lines = [".reg .b32 lane;"]
    for byte in range(4):
        for result, shift in ((4 + byte, 8 * byte), (byte, 8 * byte + 4)):
            lines += [f"shr.u32 lane, $8, {shift};", f"shfl.sync.idx.b32 ${result}, $9, lane, 31, 0xffffffff;"]
    return "{ " + " ".join(lines) + " }"


def _permute_asm(dtype: torch.dtype) -> str:
    """Register $q takes the levels of byte q of $4, the high nibble's first.

    Two bytes by permutes, two by shuffles from the lane that holds a level: integer units and shuffles work at the
    same time. The tables don't depend on $4 and leave the loop; a zero that ptxas
    can't see through keeps them out of uniform registers, from which each permute would first have to copy them.
    """
    table = torch.tensor(NF4, dtype=torch.float32).to(dtype).view(torch.uint8).view(16, 2).T.contiguous()
    words = [f"0x{word & 0xFFFFFFFF:08x}" for word in table.view(torch.int32).flatten().tolist()]
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


_SHUFFLE = tl.constexpr(_shuffle_asm())
_SHUFFLE_REGISTERS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] + ["f"] * 4))
_PERMUTE_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r")
_PERMUTE_FP16 = tl.constexpr(_permute_asm(torch.float16))
_PERMUTE_BF16 = tl.constexpr(_permute_asm(torch.bfloat16))


def candidates() -> Iterator[Config]:
    """Configurations worth timing."""
    for rows in (16, 32, 64):
        for outs, num_warps in ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8)):
            for unroll, num_stages in ((1, 4), (1, 6), (2, 3), (2, 4), (2, 5)):
                if rows * outs // num_warps <= 1024:  # more sums a thread spill
                    yield Config(rows, outs, unroll, num_warps, num_stages)


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Takes one configuration for every product inside."""
    _override.append(config)
    try:
        yield
    finally:
        _override.pop()


def _config(num_rows: int, major: int) -> Config:
    if _override:
        return _override[-1]
    return CONFIGS[min(64, max(16, triton.next_power_of_2(num_rows))), min(major, 9)]


def _splits(num_warps: int, blocks: int, multiprocessors: int) -> int:
    """Parts of the input that are summed apart: the number that leaves the busiest multiprocessor the least to do.

    A part costs some six blocks more than it decodes; twelve warps a multiprocessor hide each other's waiting.
    """

    def cost(splits: int) -> float:
        busiest = max(12, 2 * triton.cdiv(num_warps * splits, 2 * multiprocessors))
        return busiest * (triton.cdiv(blocks, splits) + 6)

    return min(range(1, max(1, min(16, blocks // 8)) + 1), key=cost)


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def specimens() -> Iterator[Specimen]:
    """Dequantise and multiply at a Llama-3.1-8B feed-forward shape."""
    quantised = {"code": "*u8", "absmax": "*u8"}
    quantised |= dict.fromkeys(("absmax_code", "absmax_scale", "absmax_offset"), "*fp32")
    for dtype in ("*bf16", "*fp16"):
        constants = {"BLOCKS": _DEQUANTIZE_BLOCKS, "SHUFFLE": True}
        sizes = dict.fromkeys(("num_elements", "num_bytes", "num_blocks"), "i32")
        signature = {**quantised, "weight": dtype, **sizes, **dict.fromkeys(constants, "constexpr")}
        yield Specimen(_dequantize, signature, constants, num_warps=4, num_stages=1)
        for (rows, major), config in CONFIGS.items():
            if major != 9:
                continue
            constants = {"OUT": 4096, "IN": 14336, "ROWS": rows, "OUTS": config.outs, "SPLITS": 4}
            constants |= {"UNROLL": config.unroll, "HAS_BIAS": False, "PERMUTE": True}
            pointers = {"x": dtype, **quantised, "code": "*i16", "bias": dtype, "sums": "*fp32"}
            signature = {**pointers, "num_rows": "i32", "x_stride": "i32", **dict.fromkeys(constants, "constexpr")}
            yield Specimen(_linear, signature, constants, config.num_warps, config.num_stages)
    constants = {"OUT": 4096, "SPLITS": 4, "HAS_BIAS": True, "BLOCK": _ADD}
    signature = {"sums": "*fp32", "bias": "*bf16", "y": "*bf16", "num_rows": "i32"}
    yield Specimen(_add_splits, signature | dict.fromkeys(constants, "constexpr"), constants, num_warps=4, num_stages=1)
