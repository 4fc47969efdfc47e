"""The embedding gather: memory-bound, one pass over the rows that are wanted."""
# pyright: reportMissingParameterType=false, reportArgumentType=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2

_BLOCK = 4096  # columns a program, 32 a thread: four 16-byte loads in flight


def embedding(token_T: Tensor, weight_VH: Tensor) -> Tensor:
    """See `peftkit_kernels.reference.embedding`."""
    weight_VH = weight_VH if weight_VH.stride(1) == 1 else weight_VH.contiguous()
    num_rows, width = token_T.shape[0], weight_VH.shape[1]
    x_TH = torch.empty(num_rows, width, dtype=weight_VH.dtype, device=weight_VH.device)
    if x_TH.numel():
        block = min(_BLOCK, next_power_of_2(width))
        grid = (num_rows, cdiv(width, block))
        _gather[grid](token_T, weight_VH, x_TH, token_T.stride(0), weight_VH.stride(0), WIDTH=width, BLOCK=block)
    return x_TH


@triton.jit
def _gather(token, weight, x, token_stride, weight_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    source = tl.load(token + row * token_stride)
    tl.store(x + row * WIDTH + column, tl.load(weight + source * weight_stride + column, mask=mask), mask=mask)


def specimens() -> Iterator[Specimen]:
    """Hidden sizes 4096 and 1536."""
    for width in (4096, 1536):
        constants = {"WIDTH": width, "BLOCK": min(_BLOCK, next_power_of_2(width))}
        pointers = {"token": "*i64", "weight": "*bf16", "x": "*bf16"}
        signature = {**pointers, "token_stride": "i32", "weight_stride": "i32"}
        signature |= dict.fromkeys(constants, "constexpr")
        yield Specimen(_gather, signature, constants, num_warps=4, num_stages=1)
