"""Frozen linear layers that share an input, with their low-rank updates, as one step of autograd.

    u   = drop(x)                            one mask for the group, made again in backward from its seed
    h_i = s_i u A_iᵀ                         one product with the rows of all A
    y_i = c_i ∘ (x W_iᵀ + h_i B_iᵀ) + b_i    c_i = m_i / ‖W_i + s_i B_i A_i‖ by row for DoRA, else 1

Backward has no gradient for W. With g_i = s_i (c_i ∘ dy_i) B_i and ‖·‖ taken for constant:

    dA_i = g_iᵀ u        dB_i = c_i ∘ (dy_iᵀ h_i)        dx = Σ (c_i ∘ dy_i) W_i + mask ∘ Σ g_i A_i

All products are of x's dtype and summed in float32; dA and dB come out in float32. The small product of an update is
written first and the large one added to it, so that no output is passed over for the update's sake; c scales the rows
of W and B and no output either. A weight in 4 bits is dequantised once a pass and freed as soon as it is multiplied by.
Saved are x and h, once for the group, for DoRA y too, and nothing of a token for layers without a trained update.

All but y is saved before the large products. So activation checkpointing, which computes a layer again until it has
what backward needs, leaves out the large product of the last linear layer, a quarter of all.

N rows, I inputs, O outputs, R rank, S the sum of the ranks.
"""
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from peftkit.methods.frozen import dequantized
from peftkit_kernels.dropout import seeded_dropout

SMALLEST_NORM = 1e-18
"""What a row of zeros is taken to have, as that of a padding token: DoRA divides by it."""

_FEWEST_ROWS = 256

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A low-rank update of a layer, and what is trained of it."""

    A_RI: nn.Parameter
    B_OR: nn.Parameter
    scale: float
    dropout: float = 0.0
    """Share of the inputs that this pass drops."""
    bias_O: nn.Parameter | None = None
    start_A: Tensor | None = None
    start_B: Tensor | None = None
    """A₀ (R, I) and B₀ (O, R), whose product is subtracted."""
    magnitude_O: nn.Parameter | None = None
    square_O: Tensor | None = None
    """‖W‖² by row, for DoRA."""

    @property
    def rank(self) -> int:
        """Rows of A, those of a start too."""
        return len(self.A_RI) * (1 if self.start_A is None else 2)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B of the whole update: of twice the rank where a start is subtracted, [A; A₀] and [B | −B₀]."""
        if self.start_A is None or self.start_B is None:
            return self.A_RI, self.B_OR
        return torch.cat([self.A_RI, self.start_A]), torch.cat([self.B_OR, -self.start_B], 1)

    def row_norms(self, product_OR: Tensor) -> Tensor:
        """‖W + s B A‖ by row, (O,), from W Aᵀ and without an (O, I) matrix."""
        assert self.square_O is not None
        A_RI, B_OR = self.factors()
        cross_O = (product_OR.to(B_OR.dtype) * B_OR).sum(1)
        update_O = ((B_OR @ (A_RI @ A_RI.T)) * B_OR).sum(1)
        norm_O = self.square_O + 2 * self.scale * cross_O + self.scale**2 * update_O
        return norm_O.clamp(min=SMALLEST_NORM**2).sqrt()

    def parameters(self) -> tuple[nn.Parameter | None, ...]:
        """All that may be trained, in one order whatever there is."""
        return self.A_RI, self.B_OR, self.bias_O, self.magnitude_O


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A frozen linear layer with a weight (O, I), in NF4 or not, and its update."""

    weight: Tensor
    bias_O: Tensor | None = None
    update: Update | None = None

    @property
    def outputs(self) -> int:
        """O."""
        return int(getattr(self.weight, "quant_state", self.weight).shape[0])

    @property
    def is_dora(self) -> bool:
        """Whether its outputs are scaled by learnt magnitudes."""
        return self.update is not None and self.update.magnitude_O is not None

    def multiply(self, x_NI: Tensor, y_NO: Tensor) -> None:
        """Adds x Wᵀ to y, which is there, or without an update writes x Wᵀ + b over what is there."""
        weight_IO = self.dense(x_NI.dtype).T
        if self.update is not None:
            y_NO.addmm_(x_NI, weight_IO)
        elif self.bias_O is not None:
            torch.addmm(self.bias_O, x_NI, weight_IO, out=y_NO)
        else:
            torch.mm(x_NI, weight_IO, out=y_NO)

    def dense(self, dtype: torch.dtype, c_O: Tensor | None = None) -> Tensor:
        """c ∘ W (O, I) in `dtype`."""
        weight_OI = dequantized(self.weight, dtype)
        return weight_OI if c_O is None else self.scaled(weight_OI, c_O)

    def scaled(self, weight_OI: Tensor, c_O: Tensor) -> Tensor:
        """c ∘ W, of what `dense` gave; in its place unless that is the base's own weight."""
        if self.weight.dtype == weight_OI.dtype:
            return (weight_OI * c_O.unsqueeze(1)).to(weight_OI.dtype)
        return weight_OI.mul_(c_O.unsqueeze(1))


def fits(layer: nn.Module, x: Tensor) -> bool:
    """Whether `project` does a frozen layer's work on x (…, I), and at least as fast as the layer itself.

    Few rows without a gradient, as in generation, are left to kernels that don't dequantise a whole weight for them.
    """
    few = x.numel() < _FEWEST_ROWS * x.shape[-1] and not torch.is_grad_enabled()
    return not few and why_not(layer, x.dtype) is None


def why_not(layer: nn.Module, dtype: torch.dtype) -> str | None:
    """What of a layer keeps `project` from doing its work on inputs of a dtype, if anything does."""
    if has_hooks(layer):
        return "with a hook"
    state = getattr(layer, "quant_state", None)
    if not isinstance(layer, nn.Linear) or (state is None and type(layer) is not nn.Linear):
        return f"of {type(layer).__name__}"
    weight = layer.weight
    if weight.requires_grad:
        return "trained whole"
    if state is not None and getattr(weight, "quant_state", None) is None:
        weight.quant_state = state  # type: ignore[attr-defined] # which is lost where weights are put together of shards
    computing = weight.dtype if state is None else getattr(layer, "compute_dtype", None) or dtype
    return None if computing == dtype else f"that compute in {str(computing).removeprefix('torch.')}"


def has_hooks(layer: nn.Module) -> bool:
    """Whether anything looks at a layer's calls."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def project(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    """y_i (…, O_i) of x (…, I) for each projection, in x's dtype.

    Gradients reach x and what the updates train. The updates of a group drop the same share, and the same inputs.
    """
    parameters = [parameter for one in projections if one.update for parameter in one.update.parameters()]
    x_NI = x.reshape(-1, x.shape[-1])
    ys = _Group.apply(x_NI, tuple(projections), *parameters)
    with torch.no_grad():
        for one, y_NO in zip(projections, ys, strict=True):
            if not one.is_dora:
                one.multiply(x_NI, y_NO.detach())
    return tuple(y_NO.view(*x.shape[:-1], y_NO.shape[1]) for y_NO in ys)


class _Group(torch.autograd.Function):
    """x (N, I), the projections, then `Update.parameters` of each update → what the updates give to each y (N, O).

    `project` adds the product with the weight, except for DoRA; the gradients are those of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, projections: tuple[Projection, ...], *parameters: nn.Parameter | None
    ) -> tuple[Tensor, ...]:
        updates = [one.update for one in projections if one.update]
        ctx.projections, ctx.updates = projections, updates
        ctx.share = max((update.dropout for update in updates), default=0.0)
        seed = torch.randint(2**62, (), device=x_NI.device) if ctx.share else None
        A_SI, Bs = _cast(updates, x_NI)
        h_NS = _scaled(_dropped(x_NI, seed, ctx.share) @ A_SI.T, updates)
        low = zip(_by_rank(A_SI, updates), _by_rank(h_NS, updates, 1), Bs, strict=True)
        ys, cs, kept = list[Tensor](), list[Tensor | None](), list[Tensor | None]()
        for one in projections:
            if one.update is None:
                ys.append(x_NI.new_empty(len(x_NI), one.outputs))
                continue
            y_NO, c_O = _adapted(x_NI, one, one.update, *next(low))
            ys.append(y_NO)
            cs.append(c_O)
            kept.append(None if c_O is None else y_NO)
        trains = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(x_NI if trains else None, h_NS if trains else None, seed, A_SI, *Bs, *cs, *kept)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, h_NS, seed, A_SI, *rest = ctx.saved_tensors
        updates, num = ctx.updates, len(ctx.updates)
        Bs, cs, kept = rest[:num], rest[num : 2 * num], rest[2 * num :]
        outer = [dy_NO for one, dy_NO in zip(ctx.projections, dys, strict=True) if one.update]
        g_NS = dys[0].new_empty(len(dys[0]), len(A_SI))
        for g_NR, dy_NO, B_OR in zip(_by_rank(g_NS, updates, 1), outer, Bs, strict=True):
            torch.mm(dy_NO, B_OR, out=g_NR)
        _scaled(g_NS, updates)
        grads: list[Tensor | None] = [None] * (4 * num)
        if x_NI is not None:
            dA_SI = _summed(g_NS.T, _dropped(x_NI, seed, ctx.share))
            layers = [one for one in ctx.projections if one.update]
            low = zip(layers, outer, _by_rank(h_NS, updates, 1), _by_rank(dA_SI, updates), cs, kept, strict=True)
            grads = [grad for one in low for grad in _gradients(*one)]
        del x_NI, h_NS  # dx may take their room
        dx_NI = None
        if ctx.needs_input_grad[0]:
            dx_NI = _dropped(g_NS @ A_SI, seed, ctx.share) if num else None
            factors = iter(cs)
            for one, dy_NO in zip(ctx.projections, dys, strict=True):
                weight_OI = one.dense(dy_NO.dtype, next(factors) if one.update else None)
                dx_NI = dy_NO @ weight_OI if dx_NI is None else dx_NI.addmm_(dy_NO, weight_OI)
                del weight_OI
        return dx_NI, None, *grads


def _adapted(
    x_NI: Tensor, one: Projection, update: Update, A_RI: Tensor, h_NR: Tensor, B_OR: Tensor
) -> tuple[Tensor, Tensor | None]:
    """y (N, O) but for the weight's share. For DoRA all of y, and c (O,), which is put into B too."""
    bias_O = one.bias_O
    if update.bias_O is not None:
        own_O = update.bias_O * update.scale
        bias_O = (own_O if bias_O is None else bias_O + own_O).to(x_NI.dtype)
    weight_OI = c_O = None
    if update.magnitude_O is not None:
        weight_OI = one.dense(x_NI.dtype)
        c_O = update.magnitude_O / update.row_norms(weight_OI @ A_RI.T)
        weight_OI = one.scaled(weight_OI, c_O)
        B_OR.mul_(c_O.unsqueeze(1))
    y_NO = h_NR @ B_OR.T if bias_O is None else torch.addmm(bias_O, h_NR, B_OR.T)
    return y_NO if weight_OI is None else y_NO.addmm_(x_NI, weight_OI.T), c_O


def _gradients(
    one: Projection, dy_NO: Tensor, h_NR: Tensor, dA_RI: Tensor, c_O: Tensor | None, y_NO: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Those of `Update.parameters`."""
    update = one.update
    assert update is not None
    R = len(update.A_RI)
    dB_OR = _summed(dy_NO.T, h_NR[:, :R])
    dA_RI = dA_RI if len(dA_RI) == R else dA_RI[:R].clone()
    dbias_O = dmagnitude_O = None
    if update.bias_O is not None:
        dbias_O = dy_NO.sum(0, dtype=dB_OR.dtype) * update.scale
    if c_O is not None and y_NO is not None and update.magnitude_O is not None:
        dB_OR.mul_(c_O.unsqueeze(1))
        # Σ dy ∘ z / ‖…‖ where y = c ∘ z + b; a weight's row of zeros, whose m is zero, keeps it
        outer_O = (dy_NO * y_NO).sum(0, dtype=dB_OR.dtype)
        if one.bias_O is not None:
            outer_O -= one.bias_O * dy_NO.sum(0, dtype=dB_OR.dtype)
        dmagnitude_O = torch.where(update.magnitude_O == 0, 0.0, outer_O / update.magnitude_O)
    return tuple(
        None if grad is None or parameter is None else grad.to(parameter.dtype)
        for grad, parameter in zip((dA_RI, dB_OR, dbias_O, dmagnitude_O), update.parameters(), strict=True)
    )


def _cast(updates: Sequence[Update], x_NI: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The rows of all A (S, I), and B (O, R) of each update, in x's dtype."""
    factors = [update.factors() for update in updates]
    sources = [*(A_RI for A_RI, _ in factors), *(B_OR for _, B_OR in factors)]
    flat = x_NI.new_empty(sum(source.numel() for source in sources))
    pieces = flat.split([source.numel() for source in sources]) if sources else ()
    views = [piece.view(source.shape) for piece, source in zip(pieces, sources, strict=True)]
    if views:
        torch._foreach_copy_(views, sources)  # one launch
    S = sum(update.rank for update in updates)
    return flat[: S * x_NI.shape[1]].view(S, x_NI.shape[1]), views[len(updates) :]


def _scaled(tensor_NS: Tensor, updates: Sequence[Update]) -> Tensor:
    """The tensor, whose columns are multiplied in place by their updates' s."""
    scales = {update.scale for update in updates}
    if len(scales) > 1:
        for tensor_NR, update in zip(_by_rank(tensor_NS, updates, 1), updates, strict=True):
            tensor_NR.mul_(update.scale)
    elif scales != {1.0} and scales:
        tensor_NS.mul_(scales.pop())
    return tensor_NS


def _by_rank(tensor: Tensor, updates: Sequence[Update], dim: int = 0) -> tuple[Tensor, ...]:
    """The share of each update in S rows or columns."""
    return tensor.split([update.rank for update in updates], dim) if updates else ()


def _dropped(x_NI: Tensor, seed: Tensor | None, share: float) -> Tensor:
    return x_NI if seed is None else seeded_dropout(x_NI, seed, share)


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of halves in float32."""
    if a.dtype not in _HALVES:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
