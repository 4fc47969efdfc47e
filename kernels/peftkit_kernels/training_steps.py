"""The steps of training's operations, forward and backward, in plain PyTorch: specification, test oracle and CPU path.

Shape letters: N rows, H hidden, F feed-forward width, Q query heads, K KV heads, D head size, V vocabulary. Computed in
float32 (float64 for float64), results in the input's dtype.
"""

import math

import torch
from torch import Tensor

from peftkit_kernels.reference import nf4_dequantize

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Activations that `gated` knows: SiLU, GELU by its approximation with tanh, GELU."""


def rms_norm_forward(x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Root-mean-square normalisation over the last dimension, with what its backward needs.

    Semantics: `scale = 1 / sqrt(mean(x²) + eps); y = x * scale * weight`. x may have more leading dimensions.
    Returns (y, scale_N), scale_N of float32 and shaped like x without its last dimension.
    """
    wide_NH = _wide(x_NH)
    scale_N = (wide_NH.square().mean(-1) + eps).rsqrt()
    return (wide_NH * scale_N.unsqueeze(-1) * weight_H).to(x_NH.dtype), scale_N


def add_rms_norm_forward(
    x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm_forward` of `x + residual`, rounded to x's dtype before. Returns (y, x + residual, scale_N)."""
    total_NH = x_NH + residual_NH
    y_NH, scale_N = rms_norm_forward(total_NH, weight_H, eps)
    return y_NH, total_NH, scale_N


def rms_norm_backward(
    dy_NH: Tensor, x_NH: Tensor, weight_H: Tensor, scale_N: Tensor, added_NH: Tensor | None = None
) -> Tensor:
    """The gradient of RMS norm's input.

    Semantics, with n = x * scale and g = dy * weight: `dx = scale * (g - n * mean(g * n)) + added`. scale_N is
    `rms_norm_forward`'s, added what else reaches x.
    """
    scale_N1 = scale_N.unsqueeze(-1)
    normed_NH, weighted_NH = _wide(x_NH) * scale_N1, _wide(dy_NH) * weight_H
    dx_NH = scale_N1 * (weighted_NH - normed_NH * (weighted_NH * normed_NH).mean(-1, keepdim=True))
    return (dx_NH if added_NH is None else dx_NH + added_NH).to(x_NH.dtype)


def rotate(
    q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions (rotate-half convention).

    Semantics, for each row and head, where rotate_half((a, b)) = (-b, a) on halves:
        y = x * cos + rotate_half(x) * sin                  (inverse: the transposed map, which is its gradient)
    Heads may lie anywhere in memory as long as each is contiguous. Returns fresh (q_NQD, k_NKD).
    """
    return _turn(q_NQD, cos_ND, sin_ND, inverse), _turn(k_NKD, cos_ND, sin_ND, inverse)


def rotate_(q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> None:
    """`rotate` with its results written over queries and keys."""
    for out, turned in zip((q_NQD, k_NKD), rotate(q_NQD, k_NKD, cos_ND, sin_ND), strict=True):
        out.copy_(turned)


def rotate_back(dq_NQD: Tensor, dk_NKD: Tensor, dv_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """The gradient of what queries, keys and values were before `rotate`, of all their heads (N, Q + 2K, D)."""
    return torch.cat([*rotate(dq_NQD, dk_NKD, cos_ND, sin_ND, inverse=True), dv_NKD], 1)


def gated(gate_NF: Tensor, up_NF: Tensor, activation: str) -> Tensor:
    """Gated activation of two tensors of one shape. Semantics: `h = activation(gate) * up`, one of ACTIVATIONS."""
    return (_activated(_wide(gate_NF), activation)[0] * up_NF).to(gate_NF.dtype)


def gated_backward(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of `gated`'s inputs. Semantics: `(dh * up * activation'(gate), dh * activation(gate))`."""
    value_NF, slope_NF = _activated(_wide(gate_NF), activation)
    return (slope_NF.mul_(up_NF).mul_(dh_NF)).to(gate_NF.dtype), (value_NF.mul_(dh_NF)).to(up_NF.dtype)


def gated_backward_(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, activation: str) -> None:
    """`gated_backward` with the gradients of gate and up written over gate and up."""
    dgate_NF, dup_NF = gated_backward(dh_NF, gate_NF, up_NF, activation)
    gate_NF.copy_(dgate_NF)
    up_NF.copy_(dup_NF)


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
    """The rows of several matrices below one another, each as `nf4_dequantize` gives it: (Σ rows, columns)."""
    tables = zip(codes, absmaxes, absmax_codes, absmax_scales, absmax_offsets, rows, strict=True)
    return torch.cat(
        [
            nf4_dequantize(code_X, absmax_B, table, absmax_scale, offset, (num_rows, columns), dtype)
            for code_X, absmax_B, table, absmax_scale, offset, num_rows in tables
        ]
    )


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of each row. Semantics: `loss = log Σ exp(logits) - logits[target]`, target int64 in [0, V).

    Returns loss_N of float32.
    """
    wide_NV = _wide(logits_NV)
    return wide_NV.logsumexp(-1) - wide_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)


def cross_entropy_grad(logits_NV: Tensor, targets_N: Tensor, scale: float = 1.0) -> Tensor:
    """`cross_entropy`, with the gradient of scale * loss written over the logits.

    Semantics: `logits = scale * (softmax(logits) - onehot(target))`. Returns loss_N of float32, not scaled.
    """
    wide_NV, target_N1 = _wide(logits_NV), targets_N.unsqueeze(1)
    total_N = wide_NV.logsumexp(-1)
    loss_N = total_N - wide_NV.gather(1, target_N1).squeeze(1)
    gradient_NV = wide_NV.sub_(total_N.unsqueeze(1)).exp_()  # in place: over the logits where they are float32
    gradient_NV.scatter_add_(1, target_N1, gradient_NV.new_full(target_N1.shape, -1.0))
    logits_NV.copy_(gradient_NV.mul_(scale))
    return loss_N


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _turn(x_NXD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool) -> Tensor:
    first, second = _wide(x_NXD).chunk(2, dim=-1)
    (cos, cos2), (sin, sin2) = cos_ND.unsqueeze(1).chunk(2, dim=-1), sin_ND.unsqueeze(1).chunk(2, dim=-1)
    if inverse:
        halves = first * cos + second * sin2, second * cos2 - first * sin
    else:
        halves = first * cos - second * sin, second * cos2 + first * sin2
    return torch.cat(halves, dim=-1).to(x_NXD.dtype)


def _activated(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation and its derivative; gelu_tanh(g) = g σ(2 √(2/π) (g + 0.044715 g³)), σ the logistic function."""
    if activation == "gelu":
        share = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
        return gate * share, share + gate * torch.exp(-0.5 * gate * gate) * (1 / math.sqrt(2 * math.pi))
    if activation == "silu":
        share = torch.sigmoid(gate)
        return gate * share, share * (1 + gate * (1 - share))
    root, near = 2 * math.sqrt(2 / math.pi), gate.clamp(-30, 30)  # beyond, the share is 0 or 1
    share = torch.sigmoid(root * near * (1 + 0.044715 * near * near))
    return gate * share, share + near * share * (1 - share) * root * (1 + 3 * 0.044715 * near * near)
