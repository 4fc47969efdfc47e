"""Gated activations for training, forward and backward: memory-bound, every value is read and written once."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen

_BLOCK, _NUM_WARPS = 1024, 4  # columns a program, 8 a thread: one 16-byte load of each tensor


def gated(gate_NF: Tensor, up_NF: Tensor, activation: str) -> Tensor:
    """See `peftkit_kernels.training_steps.gated`."""
    h_NF = torch.empty(gate_NF.shape, dtype=gate_NF.dtype, device=gate_NF.device)
    gate, up = _rows(gate_NF), _rows(up_NF)
    if h_NF.numel():
        constants = (gate.shape[1], _BLOCK, activation)
        _forward(_programs(gate), (gate, up, h_NF), (), (gate.stride(0), up.stride(0)), constants, _NUM_WARPS)
    return h_NF


def gated_backward(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """See `peftkit_kernels.training_steps.gated_backward`."""
    dgate_NF, dup_NF = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate_NF, up_NF))
    _backward(dh_NF, gate_NF, up_NF, dgate_NF, dup_NF, activation)
    return dgate_NF, dup_NF


def gated_backward_(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> None:
    """See `peftkit_kernels.training_steps.gated_backward_`."""
    _backward(dh_NF, gate_NF, up_NF, gate_NF, up_NF, activation)


def _backward(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, dgate_NF: Tensor, dup_NF: Tensor, activation: str) -> None:
    tensors = [_rows(x) for x in (dh_NF, gate_NF, up_NF, dgate_NF, dup_NF)]
    gate = tensors[1]
    if gate.numel():
        constants = (gate.shape[1], _BLOCK, activation)
        _again(_programs(gate), tensors, (), [x.stride(0) for x in tensors], constants, _NUM_WARPS)


@triton.jit
def _gated_forward(
    gate, up, h, gate_stride, up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    row = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    share, _ = _activate(x, ACTIVATION)
    tl.store(h + row * WIDTH + column, (x * share * by).to(h.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward(
    dh, gate, up, dgate, dup, dh_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """dgate and dup may be gate and up: a value is written by the thread that read it."""
    row = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(WIDTH, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    grad = tl.load(dh + row * dh_stride + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    share, slope = _activate(x, ACTIVATION)
    tl.store(dgate + row * dgate_stride + column, (grad * by * slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + row * dup_stride + column, (grad * x * share).to(dup.dtype.element_ty), mask=mask)


_forward, _again = Again(_gated_forward), Again(_gated_backward)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """The share of x that the activation lets through, and the activation's slope."""
    if ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-x))
        slope = share * (1.0 + x * (1.0 - share))
    else:  # share = σ(2 √(2/π) (x + 0.044715 x³)), which is 0 or 1 beyond 30
        near = tl.minimum(tl.maximum(x, -30.0), 30.0)
        square = 0.044715 * near * near
        share = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * near * (1.0 + square)))
        slope = share + near * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 3.0 * square)
    return share, slope


def specimens() -> Iterator[Specimen]:
    """Feed-forward widths 14336 and 8960."""
    for dtype in ("*bf16", "*fp16"):
        for width, activation in ((14336, "silu"), (8960, "gelu_tanh"), (14336, "gelu")):
            constants = {"WIDTH": width, "BLOCK": _BLOCK, "ACTIVATION": activation}
            for kernel in (_gated_forward, _gated_backward):
                strides = {name: "i32:16" for name in kernel.arg_names if name.endswith("_stride")}
                types = strides | dict.fromkeys(constants, "constexpr")
                signature = {name: types.get(name, dtype) for name in kernel.arg_names}
                yield Specimen(kernel, signature, constants, _NUM_WARPS, num_stages=1)


def _programs(x_NF: Tensor) -> int:
    num_rows, width = x_NF.shape
    return num_rows * -(-width // _BLOCK)


def _rows(x_NF: Tensor) -> Tensor:
    """Two-dimensional with contiguous rows, in place wherever there is a view."""
    if x_NF.stride(-1) != 1:
        x_NF = x_NF.contiguous()
    return x_NF if x_NF.dim() == 2 else x_NF.flatten(0, -2)
