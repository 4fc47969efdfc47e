"""Frozen linear layers that share an input, with their low-rank updates, as one step of autograd.

    u = drop(x)                              one mask for the group, made again in backward from its seed
    h = s u Aᵀ                               A the rows of all A_i
    y = c ∘ (x Wᵀ + h Bᵀ) + b                W the rows of all W_i, B with each B_i on its diagonal;
                                             c = m / ‖W + s B A‖ by row for DoRA, else 1

Backward has no gradient for W. With g = s (c ∘ dy) B and ‖·‖ taken for constant:

    dA = gᵀ u        dB_i = c_i ∘ (dy_iᵀ h_i)        dx = (c ∘ dy) W + mask ∘ (g A)

All products are of x's dtype and summed in float32; dA and dB come out in float32. The small product of an update is
written first and the large one added to it, so that no output is passed over for the update's sake; c scales the rows
of W and B and no output either. Weights in 4 bits are dequantised once a pass, a piece of the group at a time
(`lora_group.py`), and freed as soon as they are multiplied by. Saved are x and h, for DoRA y too, and nothing of a
token for layers without a trained update.

All but y is saved before y is computed. So activation checkpointing, which computes a layer again until it has what
backward needs, leaves out the products of the last linear layer, a quarter of all.

N rows, I inputs, O outputs, R rank, S the sum of the ranks.
"""
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from peftkit.methods.lora_group import SMALLEST_NORM as SMALLEST_NORM
from peftkit.methods.lora_group import Factors, Group, Place, Projection
from peftkit.methods.lora_group import Update as Update
from peftkit_kernels.dropout import seeded_dropout

_FEWEST_ROWS = 256

_HALVES = (torch.bfloat16, torch.float16)


def frozen_projection(layer: nn.Linear, known: Projection | None) -> Projection:
    """A layer without an update as a member of a group: what was `known` as long as weight and bias are the same."""
    if known is not None and known.weight is layer.weight and known.bias_O is layer.bias:
        return known
    return Projection(layer.weight, layer.bias)


def fits(layer: nn.Module, x: Tensor) -> bool:
    """Whether `project` does a frozen layer's work on x (…, I), and at least as fast as the layer itself.

    Few rows without a gradient, as in generation, are left to kernels that don't dequantise a whole weight for them.
    """
    few = not torch.is_grad_enabled() and x.numel() < _FEWEST_ROWS * x.shape[-1]
    return not few and why_not(layer, x.dtype) is None


def why_not(layer: nn.Module, dtype: torch.dtype) -> str | None:
    """What of a layer keeps `project` from doing its work on inputs of a dtype, if anything does."""
    if has_hooks(layer):
        return "with a hook"
    state = getattr(layer, "quant_state", None)
    if not isinstance(layer, nn.Linear) or (state is None and type(layer) is not nn.Linear):
        return f"of {type(layer).__name__}"
    weight = layer._parameters.get("weight")  # asked at every pass, and a module looks its attributes up slowly
    if weight is None:
        return f"of {type(layer).__name__} whose weight is computed"
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
    y = project_joined(x, projections)
    return (y,) if len(projections) == 1 else _Parts.apply(y, [one.outputs for one in projections])


def project_joined(x: Tensor, projections: Sequence[Projection]) -> Tensor:
    """The outputs of `project` side by side in one tensor (…, ΣO)."""
    members = tuple(projections)
    group, late = Group.of(members), list[_Late]()
    if x.dim() != 2 and not x.is_contiguous():
        x = x.contiguous()
    y = _Grouped.apply(x, members, group, late, *group.parameters)
    if late:
        with torch.no_grad():
            _multiply(group, *late[0])
    return y


_Late = tuple[Tensor, Tensor, Tensor | None, Factors]
"""y (N, ΣO), which isn't computed yet, x, h and copies."""


class _Parts(torch.autograd.Function):
    """y (…, ΣO) → its columns in parts."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(y.split_with_sizes(sizes, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None]:
        return torch.cat(dys, -1), None


class _Grouped(torch.autograd.Function):
    """x (…, I), projections, their group, a list, then `Group.parameters` → y (…, ΣO).

    Puts what `_multiply` needs into the list, which computes y; for DoRA y is computed here. The gradients are those
    of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projections: tuple[Projection, ...],
        group: Group,
        late: list[_Late],
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.projections, ctx.group = projections, group
        x_NI = _matrix(x)
        factors = group.factors(x_NI, projections)
        seed = h_NS = None
        if factors.A_SI is not None:
            seed = torch.randint(2**62, (), device=x.device) if group.share else None
            h_NS = group.product(_dropped(x_NI, seed, group.share), factors.A_SI.T)
        y = torch.empty((*x.shape[:-1], group.outputs), dtype=x.dtype, device=x.device)
        doras = list[Tensor]()
        if group.has_dora:
            assert h_NS is not None
            factors, cs = _scaled(group, projections, _matrix(y), x_NI, h_NS, factors)
            doras = [*cs, y]
        else:
            late.append((_matrix(y), x_NI, h_NS, factors))
        trained = (x, h_NS) if any(ctx.needs_input_grad[4:]) else (None, None)
        ctx.held = factors if factors.is_held else None
        copies = (None, None) if factors.is_held else (factors.A_SI, factors.B_OS)
        ctx.save_for_backward(*trained, seed, *copies, *doras)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, h_NS, seed, A_SI, B_OS, *doras = ctx.saved_tensors
        group: Group = ctx.group
        if ctx.held is not None:
            A_SI, B_OS = ctx.held.A_SI, ctx.held.B_OS
        dy_NO = _matrix(dy)
        grads, dx_NI = [None] * len(group.parameters), None
        if A_SI is not None:
            g_NS = group.product(dy_NO, B_OS)
            if x is not None:
                dA_SI = _summed(g_NS.T, _dropped(_matrix(x), seed, group.share))
                grads = _gradients(ctx.projections, group, dy_NO, h_NS, dA_SI, doras)
            del x, h_NS  # dx may take their room
            if ctx.needs_input_grad[0]:
                dx_NI = _dropped(g_NS @ A_SI, seed, group.share)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *grads
        cs = iter(doras)
        for piece in group.pieces:
            weight_OI, one = piece.reader.dense(dy_NO.dtype), ctx.projections[piece.first]
            if one.is_dora:
                weight_OI = one.scaled(weight_OI, next(cs))
            part_NO = dy_NO if len(group.pieces) == 1 else dy_NO[:, piece.columns]
            dx_NI = part_NO @ weight_OI if dx_NI is None else dx_NI.addmm_(part_NO, weight_OI)
            del weight_OI
        assert dx_NI is not None
        dx = dx_NI if dy.dim() == 2 else dx_NI.view(*dy.shape[:-1], dx_NI.shape[1])
        return dx, None, None, None, *grads


def _multiply(group: Group, y_NO: Tensor, x_NI: Tensor, h_NS: Tensor | None, factors: Factors) -> None:
    """Writes y over what is there."""
    if h_NS is not None:
        assert factors.B_OS is not None
        _product(h_NS, factors.B_OS.T, factors.bias_O, y_NO)
    for piece in group.pieces:
        weight_IO = piece.reader.dense(x_NI.dtype).T
        part_NO = y_NO if len(group.pieces) == 1 else y_NO[:, piece.columns]
        if h_NS is not None:
            part_NO.addmm_(x_NI, weight_IO)
        else:
            _product(x_NI, weight_IO, None if factors.bias_O is None else factors.bias_O[piece.columns], part_NO)
        del weight_IO


def _product(a: Tensor, b: Tensor, bias_O: Tensor | None, y_NO: Tensor) -> None:
    if bias_O is None:
        torch.mm(a, b, out=y_NO)
    else:
        torch.addmm(bias_O, a, b, out=y_NO)


def _scaled(
    group: Group, projections: Sequence[Projection], y_NO: Tensor, x_NI: Tensor, h_NS: Tensor, factors: Factors
) -> tuple[Factors, list[Tensor]]:
    """Writes y where magnitudes scale it. Gives the copies with c ∘ B in the place of B, and each c (O,)."""
    assert factors.A_SI is not None and factors.B_OS is not None
    B_OS, cs = factors.B_OS.clone(), list[Tensor]()
    places = {place.member: place for place in group.places}
    for piece in group.pieces:
        one, place = projections[piece.first], places.get(piece.first)
        weight_OI = piece.reader.dense(x_NI.dtype)
        if place is not None and place.update.magnitude_O is not None:
            c_O = place.update.magnitude_O / place.update.row_norms(weight_OI @ factors.A_SI[place.ranks].T)
            weight_OI = one.scaled(weight_OI, c_O)
            B_OS[piece.columns].mul_(c_O.unsqueeze(1))
            cs.append(c_O)
        bias_O = None if factors.bias_O is None else factors.bias_O[piece.columns]
        part_NO = y_NO[:, piece.columns]
        _product(h_NS, B_OS[piece.columns].T, bias_O, part_NO)
        part_NO.addmm_(x_NI, weight_OI.T)
        del weight_OI
    return Factors(factors.A_SI, B_OS, None), cs


def _gradients(
    projections: Sequence[Projection],
    group: Group,
    dy_NO: Tensor,
    h_NS: Tensor,
    dA_SI: Tensor,
    doras: Sequence[Tensor],
) -> list[Tensor]:
    """Those of `Group.parameters`; `doras` are each c and y."""
    grads, cs = list[Tensor](), iter(doras)
    alone = len(group.places) == len(group.sizes) == 1
    for place in group.places:
        update, R = place.update, place.update.A_RI.shape[0]
        own_NO = dy_NO if alone else dy_NO[:, place.columns]
        # without a start's own
        h_NR = h_NS if alone and h_NS.shape[1] == R else h_NS[:, place.ranks.start : place.ranks.start + R]
        dA_RI = dA_SI if alone and dA_SI.shape[0] == R else dA_SI[place.ranks.start : place.ranks.start + R]
        dB_OR = _summed(own_NO.T, h_NR)
        own = [dA_RI if place.update.rank == R else dA_RI.clone(), dB_OR]
        if update.bias_O is not None:
            own.append(own_NO.sum(0, dtype=dB_OR.dtype) * update.scale)
        if update.magnitude_O is not None:
            dB_OR.mul_(next(cs).unsqueeze(1))
            own.append(_magnitude_gradient(projections[place.member], place, own_NO, doras[-1], dB_OR.dtype))
        grads += own
    both = zip(grads, group.parameters, strict=True)
    return [grad if grad.dtype == parameter.dtype else grad.to(parameter.dtype) for grad, parameter in both]


def _magnitude_gradient(one: Projection, place: Place, dy_NO: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ dy ∘ z / ‖…‖ where y = c ∘ z + b; a weight's row of zeros, whose m is zero, keeps it."""
    magnitude_O = place.update.magnitude_O
    assert magnitude_O is not None
    outer_O = (dy_NO * _matrix(y)[:, place.columns]).sum(0, dtype=dtype)
    if one.bias_O is not None:
        outer_O -= one.bias_O * dy_NO.sum(0, dtype=dtype)
    return torch.where(magnitude_O == 0, 0.0, outer_O / magnitude_O)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _dropped(x_NI: Tensor, seed: Tensor | None, share: float) -> Tensor:
    return x_NI if seed is None else seeded_dropout(x_NI, seed, share)


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of halves in float32."""
    if a.dtype not in _HALVES:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
