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
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from peftkit.methods.frozen import Reader
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
        return self.A_RI.shape[0] * (1 if self.start_A is None else 2)

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

    def parameters(self) -> list[nn.Parameter]:
        """All that may be trained."""
        return [one for one in (self.A_RI, self.B_OR, self.bias_O, self.magnitude_O) if one is not None]


@dataclass(slots=True, eq=False)
class Projection:
    """A frozen linear layer with a weight (O, I), in NF4 or not, and its update."""

    weight: Tensor
    bias_O: Tensor | None = None
    update: Update | None = None
    outputs: int = field(init=False)
    """O."""
    is_dora: bool = field(init=False)
    """Whether its outputs are scaled by learnt magnitudes."""
    reader: Reader = field(init=False)
    group: "Group | None" = field(init=False, default=None)
    """The last one that it was the first of."""

    def __post_init__(self) -> None:
        self.outputs = int(getattr(self.weight, "quant_state", self.weight).shape[0])
        self.is_dora = self.update is not None and self.update.magnitude_O is not None
        self.reader = Reader(self.weight)

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
        weight_OI = self.reader.dense(dtype)
        return weight_OI if c_O is None else self.scaled(weight_OI, c_O)

    def scaled(self, weight_OI: Tensor, c_O: Tensor) -> Tensor:
        """c ∘ W, of what `dense` gave; in its place unless that is the base's own weight."""
        if self.weight.dtype == weight_OI.dtype:
            return (weight_OI * c_O.unsqueeze(1)).to(weight_OI.dtype)
        return weight_OI.mul_(c_O.unsqueeze(1))


class Group:
    """What is the same at every call of projections that share an input; the first of them keeps it."""

    __slots__ = ("others", "parameters", "ranks", "scale", "scales", "shapes", "share", "size", "updates")

    def __init__(self, projections: tuple[Projection, ...]) -> None:
        self.others = projections[1:]  # without the first, so that neither keeps the other alive
        self.updates = updates = [one.update for one in projections if one.update]
        self.parameters = [parameter for update in updates for parameter in update.parameters()]
        self.ranks = [update.rank for update in updates]
        self.share = max((update.dropout for update in updates), default=0.0)
        self.scales = [update.scale for update in updates]
        self.scale = self.scales[0] if len(set(self.scales)) == 1 else None
        """That of all, if it is one."""
        wide = [(rank, update.A_RI.shape[1]) for rank, update in zip(self.ranks, updates, strict=True)]
        tall = [(len(update.B_OR), rank) for rank, update in zip(self.ranks, updates, strict=True)]
        self.shapes: list[tuple[tuple[int, int], tuple[int, int], int]] = []
        """Shape, strides and place in one flat tensor of each A, then of each B."""
        self.size = 0
        for rows, columns in wide + tall:
            self.shapes.append(((rows, columns), (columns, 1), self.size))
            self.size += rows * columns

    @staticmethod
    def of(projections: tuple[Projection, ...]) -> "Group":
        """The group of projections, which is known if they met last time."""
        known = projections[0].group
        if known is not None and len(known.others) == len(projections) - 1:
            if all([one is other for one, other in zip(known.others, projections[1:], strict=True)]):
                return known
        projections[0].group = known = Group(projections)
        return known

    def cast(self, x_NI: Tensor) -> Tensor:
        """All A and B in x's dtype, flat."""
        factors = [update.factors() for update in self.updates]
        flat = torch.empty(self.size, dtype=x_NI.dtype, device=x_NI.device)
        views = [flat.as_strided(*shape) for shape in self.shapes]
        torch._foreach_copy_(views, [A_RI for A_RI, _ in factors] + [B_OR for _, B_OR in factors])  # one launch
        return flat

    def rows(self, flat: Tensor) -> Tensor:
        """The rows of all A (S, I) of what `cast` gave."""
        inputs = self.shapes[0][0][1]
        return flat.as_strided((sum(self.ranks), inputs), (inputs, 1), 0)

    def columns(self, flat: Tensor) -> list[Tensor]:
        """Each B (O, R) of it."""
        return [flat.as_strided(*shape) for shape in self.shapes[len(self.ranks) :]]

    def scaled(self, tensor_NS: Tensor) -> Tensor:
        """The tensor, whose columns are multiplied in place by their updates' s."""
        if self.scale is None:
            for tensor_NR, scale in zip(self.split(tensor_NS, 1), self.scales, strict=True):
                tensor_NR.mul_(scale)
        elif self.scale != 1.0:
            tensor_NS.mul_(self.scale)
        return tensor_NS

    def split(self, tensor: Tensor, dim: int = 0) -> Sequence[Tensor]:
        """The share of each update in S rows or columns."""
        return (tensor,) if len(self.ranks) == 1 else tensor.split_with_sizes(self.ranks, dim)


_FROZEN: WeakKeyDictionary[nn.Linear, Projection] = WeakKeyDictionary()


def frozen_projection(layer: nn.Linear) -> Projection:
    """A layer without an update as a member of a group; the same one as long as it has the same weight and bias."""
    known = _FROZEN.get(layer)
    if known is None or known.weight is not layer.weight or known.bias_O is not layer.bias:
        known = _FROZEN[layer] = Projection(layer.weight, layer.bias)
    return known


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
    members = tuple(projections)
    group, products = Group.of(members), list[tuple[Projection, Tensor, Tensor]]()
    if x.dim() != 2 and not x.is_contiguous():
        x = x.contiguous()
    ys = _Grouped.apply(x, members, group, products, *group.parameters)
    with torch.no_grad():
        for one, x_NI, y_NO in products:
            one.multiply(x_NI, y_NO)
    return ys


class _Grouped(torch.autograd.Function):
    """x (…, I), projections, their group, a list, then `Group.parameters` → what the updates give to each y (…, O).

    Puts the products with a weight that are to be added yet into the list; for DoRA there is none. The gradients are
    those of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        projections: tuple[Projection, ...],
        group: Group,
        products: list[tuple[Projection, Tensor, Tensor]],
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        ctx.projections, ctx.group = projections, group
        x_NI = _matrix(x)
        seed = flat = h_NS = None
        parts = iter(())
        if group.updates:
            seed = torch.randint(2**62, (), device=x.device) if group.share else None
            flat = group.cast(x_NI)
            A_SI = group.rows(flat)
            h_NS = group.scaled(_dropped(x_NI, seed, group.share) @ A_SI.T)
            parts = zip(group.split(A_SI), group.split(h_NS, 1), group.columns(flat), strict=True)
        ys, doras = list[Tensor](), list[Tensor]()
        for one in projections:
            y = torch.empty((*x.shape[:-1], one.outputs), dtype=x.dtype, device=x.device)
            ys.append(y)
            y_NO = _matrix(y)
            c_O = None if one.update is None else _adapt(y_NO, x_NI, one, one.update, *next(parts))
            if c_O is None:
                products.append((one, x_NI, y_NO))
            else:
                doras += c_O, y
        trains = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(flat, seed, x if trains else None, h_NS if trains else None, *doras)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        flat, seed, x, h_NS, *doras = ctx.saved_tensors
        group: Group = ctx.group
        members = list(zip(ctx.projections, [_matrix(dy) for dy in dys], strict=True))
        grads, dx_NI = [None] * len(group.parameters), None
        if flat is not None:
            outer = [dy_NO for one, dy_NO in members if one.update]
            g_NS = torch.empty((outer[0].shape[0], sum(group.ranks)), dtype=flat.dtype, device=flat.device)
            for g_NR, dy_NO, B_OR in zip(group.split(g_NS, 1), outer, group.columns(flat), strict=True):
                torch.mm(dy_NO, B_OR, out=g_NR)
            group.scaled(g_NS)
            if x is not None:
                dA_SI = _summed(g_NS.T, _dropped(_matrix(x), seed, group.share))
                grads = _gradients(ctx.projections, group, outer, group.split(h_NS, 1), group.split(dA_SI), doras)
            del x, h_NS  # dx may take their room
            if ctx.needs_input_grad[0]:
                dx_NI = _dropped(g_NS @ group.rows(flat), seed, group.share)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *grads
        cs = iter(doras[::2])
        for one, dy_NO in members:
            weight_OI = one.dense(dy_NO.dtype, next(cs) if one.is_dora else None)
            dx_NI = dy_NO @ weight_OI if dx_NI is None else dx_NI.addmm_(dy_NO, weight_OI)
            del weight_OI
        assert dx_NI is not None
        dx = dx_NI if dys[0].dim() == 2 else dx_NI.view(*dys[0].shape[:-1], dx_NI.shape[1])
        return dx, None, None, None, *grads


def _adapt(
    y_NO: Tensor, x_NI: Tensor, one: Projection, update: Update, A_RI: Tensor, h_NR: Tensor, B_OR: Tensor
) -> Tensor | None:
    """Writes y but for the weight's share. For DoRA all of y; gives c (O,), which is put into B too."""
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
    if bias_O is None:
        torch.mm(h_NR, B_OR.T, out=y_NO)
    else:
        torch.addmm(bias_O, h_NR, B_OR.T, out=y_NO)
    if weight_OI is not None:
        y_NO.addmm_(x_NI, weight_OI.T)
    return c_O


def _gradients(
    projections: Sequence[Projection],
    group: Group,
    outer: Sequence[Tensor],
    hs: Sequence[Tensor],
    dAs: Sequence[Tensor],
    doras: Sequence[Tensor],
) -> list[Tensor]:
    """Those of `Group.parameters`."""
    grads, scaled = list[Tensor](), iter(doras)
    for one, dy_NO, h_NR, dA_RI in zip([one for one in projections if one.update], outer, hs, dAs, strict=True):
        update = one.update
        assert update is not None
        R = update.A_RI.shape[0]
        dB_OR = _summed(dy_NO.T, h_NR if h_NR.shape[1] == R else h_NR[:, :R])
        own = [dA_RI if dA_RI.shape[0] == R else dA_RI[:R].clone(), dB_OR]
        if update.bias_O is not None:
            own.append(dy_NO.sum(0, dtype=dB_OR.dtype) * update.scale)
        if update.magnitude_O is not None:
            c_O, y_NO = next(scaled), _matrix(next(scaled))
            dB_OR.mul_(c_O.unsqueeze(1))
            # Σ dy ∘ z / ‖…‖ where y = c ∘ z + b; a weight's row of zeros, whose m is zero, keeps it
            outer_O = (dy_NO * y_NO).sum(0, dtype=dB_OR.dtype)
            if one.bias_O is not None:
                outer_O -= one.bias_O * dy_NO.sum(0, dtype=dB_OR.dtype)
            own.append(torch.where(update.magnitude_O == 0, 0.0, outer_O / update.magnitude_O))
        grads += own
    both = zip(grads, group.parameters, strict=True)
    return [grad if grad.dtype == parameter.dtype else grad.to(parameter.dtype) for grad, parameter in both]


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _dropped(x_NI: Tensor, seed: Tensor | None, share: float) -> Tensor:
    return x_NI if seed is None else seeded_dropout(x_NI, seed, share)


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of halves in float32."""
    if a.dtype not in _HALVES:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
