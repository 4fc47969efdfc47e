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
add_rms_norm_forward = dispatched(checks.add_rms_norm_forward)(training_steps.add_rms_norm_forward)
rms_norm_backward = dispatched(checks.rms_norm_backward)(training_steps.rms_norm_backward)
rotate = dispatched(checks.rotate)(training_steps.rotate)
rotate_ = dispatched(checks.rotate_)(training_steps.rotate_)
rotate_back = dispatched(checks.rotate_back)(training_steps.rotate_back)
gated = dispatched(checks.gated)(training_steps.gated)
gated_backward = dispatched(checks.gated_backward)(training_steps.gated_backward)
gated_backward_ = dispatched(checks.gated_backward_)(training_steps.gated_backward_)
nf4_dequantize_joined = dispatched(checks.nf4_dequantize_joined)(training_steps.nf4_dequantize_joined)
cross_entropy = dispatched(checks.cross_entropy)(training_steps.cross_entropy)
cross_entropy_grad = dispatched(checks.cross_entropy_grad)(training_steps.cross_entropy_grad)

_rms_norm_backward = unchecked(rms_norm_backward)
_rotate, _rotate_back = unchecked(rotate), unchecked(rotate_back)
_gated_backward, _gated_backward_ = unchecked(gated_backward), unchecked(gated_backward_)


def rms_norm_grad(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm with a frozen weight: y = x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich 2019).

    x may have more leading dimensions. Saves x and a float32 number a row. ValueError for a weight that wants a
    gradient.
    """
    _refuse_gradient(weight_H)
    return _RmsNorm.apply(x_NH, weight_H, eps)


def rms_norm_beside_grad(x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm_grad` of x and x itself, for what goes on beside the norm: their gradients are added in one pass."""
    _refuse_gradient(weight_H)
    return _RmsNormBeside.apply(x_NH, weight_H, eps)


def add_rms_norm_grad(x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm_beside_grad` of x + residual: the norm of the sum, and the sum."""
    _refuse_gradient(weight_H)
    return _AddRmsNorm.apply(x_NH, residual_NH, weight_H, eps)


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


def rotate_joined_grad(
    qkv_BTX: Tensor, cos_ND: Tensor, sin_ND: Tensor, num_keys: int, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate_grad` of queries and keys that lie side by side with values: (B, Q, T, D) and twice (B, K, T, D).

    X = (Q + 2 K) D, N = B T. They share memory: with `overwrite` that of qkv, which nobody else reads after this call,
    else fresh memory. The gradient of qkv comes out in one piece.
    """
    return _RotateJoined.apply(qkv_BTX, cos_ND, sin_ND, num_keys, overwrite)


def gated_joined_grad(both_X2F: Tensor, activation: str, *, overwrite: bool = False) -> Tensor:
    """`gated_grad` of gate and up side by side (…, 2 F): h (…, F). Backward gives their gradient in one piece."""
    return _GatedJoined.apply(both_X2F, activation, overwrite)


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


class _RmsNormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y_NH, scale_N = rms_norm_forward(x_NH, weight_H, eps)
        ctx.save_for_backward(x_NH, weight_H, scale_N)
        return y_NH, x_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor, dx_NH: Tensor) -> tuple[Tensor | None, ...]:
        return _rms_norm_backward(dy_NH, *ctx.saved_tensors, added_NH=dx_NH), None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y_NH, total_NH, scale_N = add_rms_norm_forward(x_NH, residual_NH, weight_H, eps)
        ctx.save_for_backward(total_NH, weight_H, scale_N)
        return y_NH, total_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NH: Tensor, dtotal_NH: Tensor) -> tuple[Tensor | None, ...]:
        dx_NH = _rms_norm_backward(dy_NH, *ctx.saved_tensors, added_NH=dtotal_NH)
        return dx_NH, dx_NH, None, None


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


class _RotateJoined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BTX: Tensor, cos_ND: Tensor, sin_ND: Tensor, num_keys: int, overwrite: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        B, T, X = qkv_BTX.shape
        D = cos_ND.shape[1]
        ctx.save_for_backward(cos_ND, sin_ND)
        qkv_NXD = (qkv_BTX.detach() if overwrite else qkv_BTX.clone()).view(B * T, X // D, D)
        sizes = (X // D - 2 * num_keys, num_keys, num_keys)
        q_NQD, k_NKD, _ = qkv_NXD.split_with_sizes(sizes, 1)
        rotate_(q_NQD, k_NKD, cos_ND, sin_ND)
        q, k, v = qkv_NXD.view(B, T, X // D, D).transpose(1, 2).split_with_sizes(sizes, 1)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        B, _, T, D = gradients[0].shape
        dq_NQD, dk_NKD, dv_NKD = [d.transpose(1, 2).reshape(B * T, -1, D) for d in gradients]
        return _rotate_back(dq_NQD, dk_NKD, dv_NKD, *ctx.saved_tensors).view(B, T, -1), None, None, None, None


class _GatedJoined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_X2F: Tensor, activation: str, overwrite: bool) -> Tensor:
        ctx.save_for_backward(both_X2F)
        ctx.activation, ctx.overwrite = activation, overwrite
        gate_NF, up_NF = _halves(both_X2F)
        h_NF = gated(gate_NF, up_NF, activation)
        return h_NF if both_X2F.dim() == 2 else h_NF.view(*both_X2F.shape[:-1], h_NF.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_XF: Tensor) -> tuple[Tensor | None, ...]:
        (both_X2F,) = ctx.saved_tensors
        both_X2F = both_X2F.detach() if ctx.overwrite else both_X2F.clone()
        _gated_backward_(dh_XF.reshape(-1, dh_XF.shape[-1]), *_halves(both_X2F), ctx.activation)
        if ctx.overwrite:
            increment_version((both_X2F,))  # a kernel's writes are not seen by autograd
        return both_X2F, None, None


def _halves(both_X2F: Tensor) -> tuple[Tensor, Tensor]:
    both_N2F = both_X2F.view(-1, both_X2F.shape[-1])
    width = both_N2F.shape[1] // 2
    return both_N2F[:, :width], both_N2F[:, width:]


def _refuse_gradient(weight_H: Tensor) -> None:
    if weight_H.requires_grad:
        raise ValueError("weight_H wants a gradient: a frozen one is wanted")
