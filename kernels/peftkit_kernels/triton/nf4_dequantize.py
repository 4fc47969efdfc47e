"""NF4 in bitsandbytes' layout, dequantised in one pass.

The bits are those of bitsandbytes: levels are float32, and scale and offset are rounded apart.
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.nf4_decode import scale, word_levels


@dataclass(frozen=True, slots=True)
class Config:
    """How weights are dequantised."""

    words: int
    """Words of eight codes a program."""
    num_warps: int


CONFIG = Config(words=256, num_warps=4)

_OVERRIDE: ContextVar[Config | None] = ContextVar("nf4_dequantize config", default=None)


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
        config = _OVERRIDE.get() or CONFIG
        if code_X.numel() % 4 or code_X.storage_offset() % 4:  # codes are read eight at a time
            code_X = F.pad(code_X, (0, -code_X.numel() % 4))
        _dequantize[(-(-num_elements // (8 * config.words)),)](
            code_X.contiguous().view(torch.int32),
            absmax_B.contiguous(),
            absmax_code.contiguous(),
            absmax_scale.contiguous(),
            absmax_offset.contiguous(),
            weight_OI,
            num_elements,
            WORDS=config.words,
            WHOLE=num_elements % (8 * config.words) == 0,
            SHUFFLE=code_X.is_cuda,
            OFFSETS=absmax_offset.dim() > 0,
            num_warps=config.num_warps,
            enable_fp_fusion=False,  # a scale is rounded before the offset is added
        )
    return weight_OI


@triton.jit
def _dequantize(
    code,
    absmax,
    absmax_code,
    absmax_scale,
    absmax_offset,
    weight,
    num_elements,
    WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
    SHUFFLE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Neighbouring threads have neighbouring words of eight codes: a warp stores 512 bytes that lie together."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    left = num_elements - first * 8
    word = tl.max_contiguous(tl.arange(0, WORDS), 1)  # or a thread would take four neighbours and move three of them
    if not WHOLE:
        word = tl.minimum(word, (left - 1) // 8)
    packed = tl.load(code + first + word)
    factor = scale(absmax, absmax_code, absmax_scale, absmax_offset, (first + word) // 8, OFFSETS)
    l0, l1, l2, l3, l4, l5, l6, l7 = word_levels(packed, SHUFFLE)
    even = tl.join(tl.join(l0, l4), tl.join(l2, l6))
    odd = tl.join(tl.join(l1, l5), tl.join(l3, l7))
    levels = tl.reshape(tl.join(even, odd), (WORDS, 8))
    value = (levels * factor[:, None]).to(weight.dtype.element_ty)
    element = tl.arange(0, WORDS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if WHOLE:
        tl.store(weight + first * 8 + element, value)
    else:
        tl.store(weight + first * 8 + element, value, mask=element < left)


def candidates() -> Iterator[Config]:
    """Configurations worth timing."""
    yield from (Config(32 * num_warps * each, num_warps) for num_warps in (2, 4, 8) for each in (1, 2, 4, 8))


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Takes `config` for every launch inside."""
    token = _OVERRIDE.set(config)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def specimens() -> Iterator[Specimen]:
    """Into both dtypes."""
    for dtype in ("*bf16", "*fp16"):
        constants = {"WORDS": CONFIG.words, "WHOLE": True, "SHUFFLE": True, "OFFSETS": False}
        signature = {"code": "*i32", "absmax": "*u8", "weight": dtype, "num_elements": "i32"}
        signature |= dict.fromkeys(("absmax_code", "absmax_scale", "absmax_offset"), "*fp32")
        signature |= dict.fromkeys(constants, "constexpr")
        yield Specimen(_dequantize, signature, constants, num_warps=CONFIG.num_warps, num_stages=1)
