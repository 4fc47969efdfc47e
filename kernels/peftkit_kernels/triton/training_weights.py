"""NF4 matrices that share their inputs, dequantised in one launch into the rows of one matrix, as `nf4_dequantize` does
each: memory-bound."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.checks import JOINED, NF4_JOINED_ELEMENTS
from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.nf4_decode import scale, word_levels

_WORDS, _NUM_WARPS = NF4_JOINED_ELEMENTS // 8, 4  # of eight codes a program, which is of one matrix


def nf4_dequantize_joined(
    codes: tuple[Tensor, ...],
    absmaxes: tuple[Tensor, ...],
    absmax_codes: tuple[Tensor, ...],
    absmax_scales: tuple[Tensor, ...],
    absmax_offsets: tuple[Tensor, ...],
    rows: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """See `peftkit_kernels.training_steps.nf4_dequantize_joined`; the bits of `nf4_dequantize`."""
    weight_OI = torch.empty((sum(rows), columns), dtype=dtype, device=codes[0].device)
    last = len(codes) - 1
    first, second, programs = [sum(rows[:count]) * columns // NF4_JOINED_ELEMENTS for count in (1, 2, 3)]
    if programs:
        tables = ([_whole_words(code_X) for code_X in codes], absmaxes, absmax_codes, absmax_scales, absmax_offsets)
        tensors = [table[place] for place in (0, min(1, last), last) for table in tables]
        constants = (_WORDS, len(codes), codes[0].is_cuda)
        _again(programs, (*tensors, weight_OI), (first, second), (), constants, _NUM_WARPS)
    return weight_OI


def _whole_words(code_X: Tensor) -> Tensor:
    """Codes are read eight at a time."""
    return code_X if code_X.data_ptr() % 4 == 0 else code_X.clone()


@triton.jit(do_not_specialize=["end_0", "end_1"])
def _dequantize_joined(
    code_0, absmax_0, absmax_code_0, absmax_scale_0, absmax_offset_0,
    code_1, absmax_1, absmax_code_1, absmax_scale_1, absmax_offset_1,
    code_2, absmax_2, absmax_code_2, absmax_scale_2, absmax_offset_2,
    weight, end_0, end_1, WORDS: tl.constexpr, COUNT: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """Programs up to end_0 have the first matrix, those up to end_1 the second."""
    program = tl.program_id(0)
    if COUNT == 1 or program < end_0:
        _part(
            code_0, absmax_0, absmax_code_0, absmax_scale_0, absmax_offset_0, weight, program, program, WORDS, SHUFFLE
        )
    elif COUNT == 2 or program < end_1:
        own = program - end_0
        _part(code_1, absmax_1, absmax_code_1, absmax_scale_1, absmax_offset_1, weight, own, program, WORDS, SHUFFLE)
    else:
        own = program - end_1
        _part(code_2, absmax_2, absmax_code_2, absmax_scale_2, absmax_offset_2, weight, own, program, WORDS, SHUFFLE)


# a scale is rounded before the offset is added
_again = Again(_dequantize_joined, enable_fp_fusion=False)


@triton.jit
def _part(
    code, absmax, absmax_code, absmax_scale, absmax_offset, weight, own, program,
    WORDS: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """Neighbouring threads have neighbouring words of eight codes: a warp stores 512 bytes that lie together."""
    first = own.to(tl.int64) * WORDS
    word = tl.max_contiguous(tl.arange(0, WORDS), 1)
    packed = tl.load(code.to(tl.pointer_type(tl.int32)) + first + word)
    factor = scale(absmax, absmax_code, absmax_scale, absmax_offset, (first + word) // 8)
    l0, l1, l2, l3, l4, l5, l6, l7 = word_levels(packed, SHUFFLE)
    even = tl.join(tl.join(l0, l4), tl.join(l2, l6))
    odd = tl.join(tl.join(l1, l5), tl.join(l3, l7))
    levels = tl.reshape(tl.join(even, odd), (WORDS, 8))
    value = (levels * factor[:, None]).to(weight.dtype.element_ty)
    element = tl.arange(0, WORDS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(weight + program.to(tl.int64) * (WORDS * 8) + element, value)


def specimens() -> Iterator[Specimen]:
    """One matrix, two, and three."""
    for dtype in ("*bf16", "*fp16"):
        for count in JOINED:
            constants = {"WORDS": _WORDS, "COUNT": count, "SHUFFLE": True}
            kinds = {"code": "*u8", "absmax": "*u8", "weight": dtype, "end": "i32"}
            kinds |= dict.fromkeys(constants, "constexpr")
            names = _dequantize_joined.arg_names
            signature = {name: kinds.get(name.rstrip("_012"), "*fp32") for name in names}
            yield Specimen(_dequantize_joined, signature, constants, _NUM_WARPS)
