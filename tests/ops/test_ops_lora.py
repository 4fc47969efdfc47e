"""Grouped LoRA, DoRA included, against float64 products row by row, and the table of rows by adapter."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit_kernels import Segments, grouped_lora, sort_by_slot


class Adapters:
    """Random LoRAs, some of them DoRAs, in a flat buffer with NaN between them; rank 0 leaves a projection alone."""

    def __init__(self, in_features: int, out_features: tuple[int, ...], ranks: list[list[int]]) -> None:
        self.in_features, self.out_features = in_features, out_features
        num_slots = len(ranks[0])
        self.a: dict[tuple[int, int], Tensor] = {}
        self.b: dict[tuple[int, int], Tensor] = {}
        self.offset_a = torch.full((len(out_features), num_slots), -1, dtype=torch.int64)
        self.c: dict[tuple[int, int], Tensor] = {}
        self.offset_b, self.offset_c = self.offset_a.clone(), self.offset_a.clone()
        self.rank = torch.tensor(ranks, dtype=torch.int32)
        self.scale = torch.randn(len(out_features), num_slots)
        pieces: list[Tensor] = []
        for p, out in enumerate(out_features):
            for s in range(num_slots):
                if r := ranks[p][s]:
                    self.a[p, s], self.b[p, s] = torch.randn(r, in_features), torch.randn(r, out)
                    matrices = [(self.a[p, s], self.offset_a), (self.b[p, s], self.offset_b)]
                    if torch.rand(()) < 0.4:
                        self.c[p, s] = torch.randn(2, out)
                        matrices.append((self.c[p, s], self.offset_c))
                    for matrix, offset in matrices:
                        pieces.append(torch.full((random.randrange(5),), float("nan")))
                        offset[p, s] = sum(piece.numel() for piece in pieces)
                        pieces.append(matrix.flatten())
        self.weights = torch.cat([*pieces, torch.full((3,), float("nan"))])

    def add(self, y: Tensor, x: Tensor, segments: Segments, **options: Any) -> Tensor:
        tables = (self.offset_a, self.offset_b, self.rank, self.scale, self.offset_c)
        rows = (segments.row_X, segments.start_G1, segments.slot_G, segments.row_slot_X)
        return grouped_lora(y, x, self.weights, *rows, *tables, self.out_features, **options)

    def exact(self, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        total = y.double().clone()
        for t, s in enumerate(slots):
            column = 0
            for p, out in enumerate(self.out_features):
                if s >= 0 and self.rank[p, s]:
                    update = x[t].double() @ self.a[p, s].double().T @ self.b[p, s].double()
                    part = total[t, column : column + out]
                    part += self.scale[p, s].double() * update
                    if (p, s) in self.c:
                        m, n = self.c[p, s].double()
                        part += m * part + n
                column += out
        return total


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_rows", [None, 1, 4])
def test_each_row_gets_its_own_adapters_update_at_its_true_rank(
    seed: int, assert_near: Callable[..., None], max_rows: int | None, deterministic: bool
) -> None:
    rng = random.Random(seed)
    for in_features, out_features in ((1, (1,)), (33, (40,)), (48, (48, 16, 16)), (17, (7, 31))):
        ranks = [[rng.choice([0, 1, 3, 8, 70]) for _ in range(5)] for _ in out_features]
        adapters = Adapters(in_features, out_features, ranks)
        for rows in (1, 6, 45):
            slots = [rng.randint(-1, 4) for _ in range(rows)]
            x, y = torch.randn(rows, in_features), torch.randn(rows, sum(out_features))
            exact = adapters.exact(y, x, slots)
            bare = [t for t, s in enumerate(slots) if s < 0]
            before = y[bare].clone()
            result = adapters.add(
                y, x, sort_by_slot(torch.tensor(slots), max_rows=max_rows), deterministic=deterministic
            )
            assert result is y
            assert_near(y, exact)
            assert torch.equal(y[bare], before), "a bare row changed"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bare_row_is_not_even_read(seed: int, deterministic: bool) -> None:
    adapters = Adapters(8, (8, 4), [[2], [3]])
    x, y = torch.randn(3, 8), torch.randn(3, 12)
    x[1], y[1] = float("nan"), float("nan")
    adapters.add(y, x, sort_by_slot(torch.tensor([0, -1, 0])), deterministic=deterministic)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_empty_segments_and_no_rows_change_nothing(seed: int, assert_near: Callable[..., None]) -> None:
    adapters = Adapters(8, (8,), [[2, 4, 1]])
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    exact = adapters.exact(y, x, [-1, 2, -1, 0])
    start, slot = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 0])
    adapters.add(y, x, Segments.of(torch.tensor([3, 1]), start.int(), slot.int()))
    assert_near(y, exact)
    before = y.clone()
    adapters.add(y, x, sort_by_slot(torch.tensor([-1, -1, -1, -1])))
    assert torch.equal(y, before)


def test_rows_are_sorted_stably_by_slot_and_cut_into_chunks() -> None:
    segments = sort_by_slot(torch.tensor([1, -1, 0, 1, 1, -1, 0, 1]), max_rows=3)
    assert segments.row_X.tolist() == [2, 6, 0, 3, 4, 7]
    assert segments.start_G1.tolist() == [0, 2, 5, 6]
    assert segments.slot_G.tolist() == [0, 1, 1]
    assert segments.row_slot_X.tolist() == [0, 0, 1, 1, 1, 1]
    assert sort_by_slot(torch.tensor([1, 0, 1])).start_G1.tolist() == [0, 1, 3]


def test_each_row_has_its_segments_slot_and_none_behind_the_last() -> None:
    start, slot = torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([4, 0, 7], dtype=torch.int32)
    assert Segments.of(torch.arange(5), start, slot).row_slot_X.tolist() == [4, 4, 7, -1, -1]


def test_chunks_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows is 0: it must be at least 1"):
        sort_by_slot(torch.tensor([0]), max_rows=0)
