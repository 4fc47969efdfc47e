"""Dropout by a hash of each element's place: memory-bound, the mask takes no memory."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.dropout import threshold
from peftkit_kernels.triton.compile import Specimen

_BLOCK = 1024  # elements a program, 8 a thread: one 16-byte load


def seeded_dropout(x_NI: Tensor, seed: Tensor, share: float) -> Tensor:
    """See `peftkit_kernels.dropout.reference`; the same mask."""
    x_NI = x_NI.contiguous()
    y_NI = torch.empty(x_NI.shape, dtype=x_NI.dtype, device=x_NI.device)
    size = y_NI.numel()
    if size:
        _dropout[(-(-size // _BLOCK),)](
            x_NI, seed, y_NI, size, threshold(share), 1.0 / (1.0 - share), BLOCK=_BLOCK, num_warps=4
        )
    return y_NI


@triton.jit
def _dropout(x, seed, y, size, threshold, factor, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    key = tl.load(seed)
    u = _mix(_mix(place.to(tl.uint32) ^ key.to(tl.uint32)) + (key >> 32).to(tl.uint32))
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * factor
    kept = u.to(tl.int64) >= threshold
    tl.store(y + place, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _mix(u):
    u = (u ^ (u >> 16)) * 0x7FEB352D
    u = (u ^ (u >> 15)) * 0x846CA68B
    return u ^ (u >> 16)


def specimens() -> Iterator[Specimen]:
    """A matrix of any size."""
    for dtype in ("*bf16", "*fp16"):
        signature = {"x": dtype, "seed": "*i64", "y": dtype, "size": "i64:16", "threshold": "i64", "factor": "fp32"}
        yield Specimen(_dropout, {**signature, "BLOCK": "constexpr"}, {"BLOCK": _BLOCK}, num_warps=4, num_stages=1)
