"""Grouped bottleneck adapters against float64 mathematics row by row."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit_kernels import BOTTLENECK_INPUTS, NON_LINEARITIES, Segments, grouped_bottleneck, sort_by_slot

EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
}
PARTS = ("down", "up", "up_bias", "norm_weight", "norm_bias", "down_bias")


class Bottlenecks:
    """Random adapters in a flat buffer with NaN between them; width 0 is a slot without one."""

    def __init__(self, hidden: int, widths: list[int], forms: list[tuple[int, int, int]]) -> None:
        self.widths, self.forms = widths, forms
        self.scale = torch.randn(len(widths))
        self.parts: list[dict[str, Tensor]] = []
        offsets: list[int] = []
        pieces: list[Tensor] = []
        for width, (_, _, normed) in zip(widths, forms, strict=True):
            sizes = ((width, hidden), (width, hidden), (hidden,), (hidden,), (hidden,), (width,))
            shapes = dict(zip(PARTS, sizes, strict=True))
            if not normed:
                del shapes["norm_weight"], shapes["norm_bias"]
            self.parts.append({name: torch.randn(shape) for name, shape in shapes.items()} if width else {})
            pieces.append(torch.full((random.randrange(5),), float("nan")))
            offsets.append(sum(piece.numel() for piece in pieces) if width else -1)
            pieces += [part.flatten() for part in self.parts[-1].values()]
        self.offset = torch.tensor(offsets)
        self.weights = torch.cat([*pieces, torch.full((3,), float("nan"))])

    def add(self, y: Tensor, residual: Tensor, segments: Segments, **options: Any) -> Tensor:
        rows = (segments.row_X, segments.start_G1, segments.slot_G, segments.row_slot_X)
        widths, forms = torch.tensor(self.widths, dtype=torch.int32), torch.tensor(self.forms, dtype=torch.int32)
        return grouped_bottleneck(y, residual, self.weights, *rows, self.offset, widths, self.scale, forms, **options)

    def exact(self, y: Tensor, residual: Tensor, slots: list[int]) -> Tensor:
        total = y.double().clone()
        for t, s in enumerate(slots):
            if s < 0 or not self.widths[s]:
                continue
            source, function, normed = self.forms[s]
            part = {name: tensor.double() for name, tensor in self.parts[s].items()}
            out, stream = y[t].double(), residual[t].double()
            x = {"output": out, "sum": out + stream, "residual": stream}[BOTTLENECK_INPUTS[source]]
            if normed:
                x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * part["norm_weight"] + part["norm_bias"]
            inner = EXACT[NON_LINEARITIES[function]](part["down"] @ x + part["down_bias"])
            total[t] += self.scale[s].double() * (inner @ part["up"] + part["up_bias"])
        return total


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_rows", [None, 1, 4])
def test_each_row_gets_its_own_adapter_of_its_own_form_and_width(
    seed: int, assert_near: Callable[..., None], max_rows: int | None, deterministic: bool
) -> None:
    rng = random.Random(seed)
    forms = [(source, function, rng.randrange(2)) for source in range(3) for function in range(5)]
    for hidden in (2, 33, 48):
        adapters = Bottlenecks(hidden, [rng.choice([0, 1, 3, 16, 70]) for _ in forms], forms)
        for rows in (1, 6, 60):
            slots = [rng.randint(-1, len(forms) - 1) for _ in range(rows)]
            y, residual = torch.randn(rows, hidden), torch.randn(rows, hidden)
            exact = adapters.exact(y, residual, slots)
            bare = [t for t, s in enumerate(slots) if s < 0 or not adapters.widths[s]]
            before, stream = y[bare].clone(), residual.clone()
            segments = sort_by_slot(torch.tensor(slots), max_rows=max_rows)
            assert adapters.add(y, residual, segments, deterministic=deterministic) is y
            assert_near(y, exact)
            assert torch.equal(y[bare], before), "a bare row changed"
            assert torch.equal(residual, stream)


@pytest.mark.parametrize("function", range(len(NON_LINEARITIES)))
@pytest.mark.parametrize("normed", [0, 1])
def test_every_non_linearity_with_and_without_a_norm(
    seed: int, assert_near: Callable[..., None], function: int, normed: int
) -> None:
    adapters = Bottlenecks(24, [11, 5], [(1, function, normed), (0, function, normed)])
    y, residual = torch.randn(9, 24), torch.randn(9, 24)
    exact = adapters.exact(y, residual, [0, 1, 0] * 3)
    assert_near(adapters.add(y, residual, sort_by_slot(torch.tensor([0, 1, 0] * 3))), exact)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_without_an_adapter_is_not_even_read(seed: int, deterministic: bool) -> None:
    adapters = Bottlenecks(8, [4, 0], [(1, 0, 1), (0, 0, 0)])
    y, residual = torch.randn(4, 8), torch.randn(4, 8)
    y[1:3], residual[1:3] = float("nan"), float("nan")
    adapters.add(y, residual, sort_by_slot(torch.tensor([0, -1, 1, 0])), deterministic=deterministic)
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


def test_empty_segments_and_no_rows_change_nothing(seed: int, assert_near: Callable[..., None]) -> None:
    adapters = Bottlenecks(8, [2, 4], [(0, 3, 0), (2, 1, 1)])
    y, residual = torch.randn(3, 8), torch.randn(3, 8)
    exact = adapters.exact(y, residual, [-1, 1, -1])
    start, slot = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0])
    adapters.add(y, residual, Segments.of(torch.tensor([1]), start.int(), slot.int()))
    assert_near(y, exact)
    before = y.clone()
    adapters.add(y, residual, sort_by_slot(torch.tensor([-1, -1, -1])))
    assert torch.equal(y, before)
