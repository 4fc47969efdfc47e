"""Operations with gradients for training over a frozen base, each one pass over memory in either direction.

They save what `save_for_backward` says and nothing else, so they run under activation checkpointing, saved-tensor hooks
and FakeTensorMode. Norm weights, cosines and sines get no gradient. N rows, H hidden, F feed-forward width, Q query
heads, K KV heads, D head size.
"""
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from peftkit_kernels import checks, training_steps
from peftkit_kernels.dispatch import dispatched, unchecked

rms_norm_forward = dispatched(checks.rms_norm_forward)(training_steps.rms_norm_forward)
rms_norm_backward = dispatched(checks.rms_norm_backward)(training_steps.rms_norm_backward)
rotate = dispatched(checks.rotate)(training_steps.rotate)
gated = dispatched(checks.gated)(training_steps.gated)
gated_backward = dispatched(checks.gated_backward)(training_steps.gated_backward)
gated_backward_ = dispatched(checks.gated_backward_)(training_steps.gated_backward_)
cross_entropy = dispatched(checks.cross_entropy)(training_steps.cross_entropy)
cross_entropy_grad = dispatched(checks.cross_entropy_grad)(training_steps.cross_entropy_grad)

_rms_norm_backward, _rotate = unchecked(rms_norm_backward), unchecked(rotate)
_gated_backward, _gated_backward_ = unchecked(gated_backward), unchecked(gated_backward_)


def rms_norm_grad(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm with a frozen weight: y = x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich 2019).

    x may have more leading dimensions. Saves x and a float32 number a row. ValueError for a weight that wants a
    gradient.
    """
    _refuse_gradient(weight_H)
    return _RmsNorm.apply(x_NH, weight_H, eps)


def rotate_grad(q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys: x * cos + rotate_half(x) * sin (Su et al. 2021), transformers' convention.

    cos_ND and sin_ND hold both halves, in any floating dtype. Saves them and nothing of q and k.
    """
    return _Rotate.apply(q_NQD, k_NKD, cos_ND, sin_ND)


def gated_grad(gate_NF: Tensor, up_NF: Tensor, activation: str, *, overwrite: bool = False) -> Tensor:
    """Gated activation: h = activation(gate) * up (Shazeer 2020), activation one of "silu", "gelu_tanh" and "gelu".

    Saves gate and up. With `overwrite` backward writes their gradients over them: for tensors that nobody else reads
    after this call, with contiguous rows. A second backward then raises RuntimeError.
    """
    if overwrite:
        checks.overwritten(gate_NF, up_NF)
    return _Gated.apply(gate_NF, up_NF, activation, overwrite)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        y_NH, scale_N = rms_norm_forward(x_NH, weight_H, eps)
        ctx.save_for_backward(x_NH, weight_H, scale_N)
        return y_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor | None, ...]:
        return _rms_norm_backward(dy_NH, *ctx.saved_tensors), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_ND, sin_ND)
        return rotate(q_NQD, k_NKD, cos_ND, sin_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_NQD: Tensor, dk_NKD: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(dq_NQD, dk_NKD, *ctx.saved_tensors, inverse=True), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor, activation: str, overwrite: bool) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        ctx.activation, ctx.overwrite = activation, overwrite
        return gated(gate_NF, up_NF, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NF: Tensor) -> tuple[Tensor | None, ...]:
        gate_NF, up_NF = ctx.saved_tensors
        if not ctx.overwrite:
            return *_gated_backward(dh_NF, gate_NF, up_NF, ctx.activation), None, None
        gate_NF, up_NF = gate_NF.detach(), up_NF.detach()
        _gated_backward_(dh_NF, gate_NF, up_NF, ctx.activation)
        increment_version((gate_NF, up_NF))  # a kernel's writes are not seen by autograd
        return gate_NF, up_NF, None, None


def _refuse_gradient(weight_H: Tensor) -> None:
    if weight_H.requires_grad:
        raise ValueError("weight_H wants a gradient: a frozen one is wanted")
