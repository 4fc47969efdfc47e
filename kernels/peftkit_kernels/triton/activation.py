"""Gated activations: memory-bound, each half of a row is read once."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv
from peftkit_kernels.triton.dependent import begins_early, launch_options, wait_turn

_BLOCK = 1024  # columns a program, 8 a thread: one 16-byte load of each half


def silu_and_mul(x_TO: Tensor, *, deterministic: bool = False) -> Tensor:
    """See `peftkit_kernels.reference.silu_and_mul`; a row's bits never depend on its neighbours."""
    return _gate(x_TO, gelu=False)


def gelu_tanh_and_mul(x_TO: Tensor, *, deterministic: bool = False) -> Tensor:
    """See `peftkit_kernels.reference.gelu_tanh_and_mul`; a row's bits never depend on its neighbours."""
    return _gate(x_TO, gelu=True)


def _gate(x_TO: Tensor, gelu: bool) -> Tensor:
    x_TO = x_TO if x_TO.stride(1) == 1 else x_TO.contiguous()
    num_rows, width = x_TO.shape[0], x_TO.shape[1] // 2
    y_TF = torch.empty(num_rows, width, dtype=x_TO.dtype, device=x_TO.device)
    if y_TF.numel():
        grid = (num_rows, cdiv(width, _BLOCK))
        dependent = begins_early(x_TO.device, num_rows)
        constants = (width, _BLOCK, gelu, dependent)
        _launch(grid, (x_TO, y_TF), (), (x_TO.stride(0),), constants, 4, **launch_options(dependent))
    return y_TF


@triton.jit
def _gated(
    x, y, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    if DEPENDENT:
        wait_turn()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = x + row * x_stride + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if GELU:  # (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)), and z = √(2/π) (gate + 0.044715 gate³)
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    else:
        inner = gate
    tl.store(y + row * WIDTH + column, (gate / (1.0 + tl.exp(-inner)) * up).to(y.dtype.element_ty), mask=mask)


_launch = Again(_gated)


def specimens(capability: int) -> Iterator[Specimen]:
    """Feed-forward widths 14336 and 8960."""
    for dtype in ("*bf16", "*fp16"):
        for width, gelu in ((14336, False), (8960, True)):
            constants = {"WIDTH": width, "BLOCK": _BLOCK, "GELU": gelu, "DEPENDENT": capability >= 90}
            signature = {"x": dtype, "y": dtype, "x_stride": "i32:16", **dict.fromkeys(constants, "constexpr")}
            yield Specimen(_gated, signature, constants, num_warps=4, num_stages=1)
