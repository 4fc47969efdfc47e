"""A kernel that only reads: what the memory gives at best."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

_BLOCK, _STEPS = 4096, 32


@triton.jit
def _sum(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(STEPS):
        offset = (tl.program_id(0) * STEPS + i).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        acc += tl.load(x + offset)
    tl.store(out + tl.program_id(0), tl.sum(acc))


def read_all(words: torch.Tensor) -> torch.Tensor:
    """Sums int32 words, a whole number of pieces of 131072, piece by piece."""
    num_programs = words.numel() // (_BLOCK * _STEPS)
    assert num_programs * _BLOCK * _STEPS == words.numel()
    out = torch.empty(num_programs, dtype=torch.int32, device=words.device)
    _sum[(num_programs,)](words, out, BLOCK=_BLOCK, STEPS=_STEPS, num_warps=8)
    return out
