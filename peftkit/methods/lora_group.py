"""Frozen linear layers that share an input: what is the same at every pass over them, and copies of their updates.

    y (N, ΣO)      columns   | O_0 | O_1 | O_2 |         a projection each
    A (S, I)       rows      | R_0 | R_1 |               an update each, of which some projections have none
    B (ΣO, S)      B_i at the projection's rows and the update's columns, zeros elsewhere: all updates are one product
    pieces         W_0 and W_1 of projections side by side, in 4 bits, dequantised into one matrix of O_0 + O_1 rows

A and B are float32; products take copies in the base's dtype, which are made at each pass, or inside `Copies.hold`
once for all passes. N rows, I inputs, O outputs, R rank, S the sum of the ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode

from peftkit.methods.frozen import JoinedReader, Reader, can_join

SMALLEST_NORM = 1e-18
"""What a row of zeros is taken to have, as that of a padding token: DoRA divides by it."""


@dataclass(slots=True)
class _Pairs:
    """Tensors, and what is copied into each."""

    to: list[Tensor] = field(default_factory=list[Tensor])
    sources: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, other: "_Pairs") -> None:
        self.to += other.to
        self.sources += other.sources

    def copy(self) -> None:
        """One launch, or some, of tensors without gaps; else one each, without Python in between."""
        if self.to:
            torch._foreach_copy_(self.to, self.sources)


class Copies:
    """Says when the updates of a model stay as they are, so that one copy of A and B serves all passes."""

    def __init__(self) -> None:
        self._depth = 0
        self._groups: WeakSet[Group] = WeakSet()
        self.round = 0
        """How often `hold` has begun."""

    @property
    def are_held(self) -> bool:
        """Whether nothing trained changes at the moment."""
        return self._depth > 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, nothing of an update may change. The memory of copies is kept for the next time."""
        apart: list[tuple[Group, Factors | None]] = []
        if not self._depth:
            self.round += 1
            if active_fake_mode() is not None:  # a rehearsal's copies have no data
                apart = [(group, group.copy) for group in self._groups]
                for group in self._groups:
                    group.set_apart(None)
            else:
                self._renew()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if active_fake_mode() is not None and not self._depth:
                for group in self._groups:
                    group.set_apart(None)
                for group, copy in apart:
                    group.set_apart(copy)

    def add(self, group: "Group") -> None:
        """A group whose copy is to be renewed when `hold` begins."""
        self._groups.add(group)

    @torch.no_grad()
    def _renew(self) -> None:
        rows, blocks = _Pairs(), _Pairs()
        for group in self._groups:
            if group.copy is not None:
                own_rows, own_blocks = group.pairs()
                rows.add(own_rows)
                blocks.add(own_blocks)
        rows.copy()
        blocks.copy()


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
    copies: Copies | None = None
    """Those of its model, if there are any."""

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

    def scaled(self, weight_OI: Tensor, c_O: Tensor) -> Tensor:
        """c ∘ W, of the weight as it was read; in its place unless that is the base's own."""
        if self.weight.dtype == weight_OI.dtype:
            return (weight_OI * c_O.unsqueeze(1)).to(weight_OI.dtype)
        return weight_OI.mul_(c_O.unsqueeze(1))

    def bias(self, like: Tensor) -> Tensor:
        """All that is added to its outputs (O,), in the dtype and on the device of `like`."""
        own_O = None if self.update is None else self.update.bias_O
        if own_O is None:
            return like.new_zeros(self.outputs) if self.bias_O is None else self.bias_O
        assert self.update is not None
        scaled_O = own_O * self.update.scale
        return (scaled_O if self.bias_O is None else self.bias_O + scaled_O).to(like.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Copies in the dtype of products."""

    A_SI: Tensor | None
    B_OS: Tensor | None
    bias_O: Tensor | None
    """Of all ΣO columns."""
    is_held: bool = False
    """Whether it stays for the passes that follow."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where an update is in its group."""

    update: Update
    member: int
    columns: slice
    """Of y, and the rows of B."""
    ranks: slice
    """Of h, the rows of A and the columns of B."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Projections whose weights are multiplied by as one matrix."""

    columns: slice
    """Of y."""
    reader: Reader | JoinedReader
    first: int
    """The first projection's place in the group."""


class Group:
    """What is the same at every call of projections that share an input; the first of them keeps it."""

    __slots__ = (
        "__weakref__",
        "_copies",
        "_pairs",
        "_round",
        "copy",
        "has_bias",
        "has_dora",
        "others",
        "outputs",
        "parameters",
        "pieces",
        "places",
        "scale",
        "share",
        "sizes",
        "sum_of_ranks",
    )

    def __init__(self, projections: tuple[Projection, ...]) -> None:
        self.others = projections[1:]  # without the first, so that neither keeps the other alive
        self.sizes = [one.outputs for one in projections]
        self.places: list[Place] = []
        self.outputs = self.sum_of_ranks = 0
        for member, one in enumerate(projections):
            columns = slice(self.outputs, self.outputs + one.outputs)
            if one.update is not None:
                ranks = slice(self.sum_of_ranks, self.sum_of_ranks + one.update.rank)
                self.places.append(Place(one.update, member, columns, ranks))
                self.sum_of_ranks = ranks.stop
            self.outputs = columns.stop
        updates = [place.update for place in self.places]
        self.parameters = [parameter for update in updates for parameter in update.parameters()]
        self.share = max((update.dropout for update in updates), default=0.0)
        scales = {update.scale for update in updates}
        self.scale = scales.pop() if len(scales) == 1 else None
        """That of all updates, if it is one."""
        self.has_dora = any([one.is_dora for one in projections])
        self.has_bias = any([one.bias_O is not None for one in projections]) or any(
            [update.bias_O is not None for update in updates]
        )
        self.pieces = list(_pieces(projections))
        self.copy: Factors | None = None
        """What is held between passes."""
        self._copies = updates[0].copies if updates else None
        self._pairs: tuple[_Pairs, _Pairs] | None = None
        self._round = 0

    @staticmethod
    def of(projections: tuple[Projection, ...]) -> "Group":
        """The group of projections, which is known if they met last time."""
        known = projections[0].group
        if known is not None and len(known.others) == len(projections) - 1:
            if all([one is other for one, other in zip(known.others, projections[1:], strict=True)]):
                return known
        projections[0].group = known = Group(projections)
        return known

    def factors(self, x_NI: Tensor, projections: Sequence[Projection]) -> Factors:
        """A, B and biases in x's dtype."""
        copies, copy = self._copies, self.copy
        if copies is None or not copies.are_held:
            return self._copied(x_NI, projections, is_held=False)
        if copy is None or copy.A_SI is None or copy.A_SI.dtype != x_NI.dtype or copy.A_SI.device != x_NI.device:
            copy = self._copied(x_NI, projections, is_held=True)
            copies.add(self)
        elif self.has_bias and self._round != copies.round:
            copy = replace(copy, bias_O=self._biases(x_NI, projections))
        else:
            return copy
        self.copy, self._round, self._pairs = copy, copies.round, None
        return copy

    def set_apart(self, copy: Factors | None) -> None:
        """Takes another copy, or none."""
        self.copy, self._pairs = copy, None

    def pairs(self) -> tuple[_Pairs, _Pairs]:
        """Where A and B go to in the copy, and what they are: those without gaps in their places, and the others."""
        if self._pairs is not None:
            return self._pairs
        assert self.copy is not None
        pairs = self._paired(self.copy)
        if all([place.update.start_A is None for place in self.places]):  # else they are put together each time
            self._pairs = pairs
        return pairs

    def _paired(self, copy: Factors) -> tuple[_Pairs, _Pairs]:
        assert copy.A_SI is not None and copy.B_OS is not None
        rows, blocks = _Pairs(), _Pairs()
        for place in self.places:
            A_RI, B_OR = place.update.factors()
            alone = len(self.places) == 1
            rows.add(_Pairs([copy.A_SI[place.ranks]], [A_RI]))
            (rows if alone else blocks).add(_Pairs([copy.B_OS[place.columns, place.ranks]], [B_OR]))
        return rows, blocks

    def _copied(self, x_NI: Tensor, projections: Sequence[Projection], *, is_held: bool) -> Factors:
        A_SI = B_OS = None
        bias_O = self._biases(x_NI, projections) if self.has_bias else None
        if self.places:
            A_SI = x_NI.new_empty(self.sum_of_ranks, x_NI.shape[1])
            B_OS = x_NI.new_zeros(self.outputs, self.sum_of_ranks)
        copy = Factors(A_SI, B_OS, bias_O, is_held)
        if self.places:
            for pairs in self._paired(copy):
                pairs.copy()
        return copy

    def _biases(self, x_NI: Tensor, projections: Sequence[Projection]) -> Tensor:
        biases = [one.bias(x_NI) for one in projections]
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, each column times its update's s."""
        if self.scale == 1.0:
            return a @ b
        if self.scale is not None:
            product_NS = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
            return product_NS.addmm_(a, b, beta=0, alpha=self.scale)  # nothing is read of what is there
        product_NS = a @ b
        for place in self.places:
            product_NS[:, place.ranks].mul_(place.update.scale)
        return product_NS


def _pieces(projections: Sequence[Projection]) -> Iterator[Piece]:
    """Neighbours are joined where their weights can be, and no magnitudes scale them."""
    first = column = 0
    while first < len(projections):
        last = first + 1
        while last < len(projections) and not any([one.is_dora for one in projections[first : last + 1]]):
            if not can_join([one.weight for one in projections[first : last + 1]]):
                break
            last += 1
        members = projections[first:last]
        columns = slice(column, column + sum([one.outputs for one in members]))
        weights = [one.weight for one in members]
        reader = JoinedReader(weights) if can_join(weights) else members[0].reader
        yield Piece(columns, reader, first)
        first, column = last, columns.stop
