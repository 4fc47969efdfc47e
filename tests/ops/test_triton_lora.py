"""The grouped LoRA kernels against float64 products row by row: small in Triton's interpreter, full size on a GPU."""

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

from peftkit_kernels.segments import Segments
from peftkit_kernels.triton.segmented import Operation, kind_of

NAN = float("nan")
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@pytest.fixture
def interpreted(interpreter: Callable[[str], ModuleType]) -> ModuleType:
    """The module, its kernels in Triton's interpreter."""
    return interpreter("lora")


@pytest.fixture
def compiled() -> ModuleType:
    """The module, its kernels compiled."""
    return importlib.import_module("peftkit_kernels.triton.lora")


@dataclass
class Case:
    """Rows by adapter and the adapters; NaN stands between the matrices and in the rows of no adapter."""

    y: Tensor
    x: Tensor
    weights: Tensor
    row: Tensor
    start: Tensor
    slot: Tensor
    offset_a: Tensor
    offset_b: Tensor
    rank: Tensor
    scale: Tensor
    offset_c: Tensor
    out: tuple[int, ...]

    def run(self, module: ModuleType, *, deterministic: bool = False) -> Tensor:
        """y with the updates; a copy."""
        y = self.y.clone()
        tables = (self.offset_a, self.offset_b, self.rank, self.scale, self.offset_c)
        segments = (self.row, self.start, self.slot, self.row_slot)
        given = (self.x, self.weights, *segments, *tables, self.out)
        assert module.grouped_lora(y, *given, deterministic=deterministic) is y
        return y

    @property
    def row_slot(self) -> Tensor:
        """The slot of each entry of `row`."""
        return Segments.of(self.row, self.start, self.slot).row_slot_X

    def exact(self) -> Tensor:
        """y in float64; rows of no adapter as they are."""
        total, features = self.y.double(), self.x.shape[1]
        for (start, end), s in zip(pairwise(self.start.tolist()), self.slot.tolist(), strict=True):
            rows, column = self.row[start:end], 0
            for p, out in enumerate(self.out):
                rank, part = int(self.rank[p, s]), total[:, column : column + out]
                column += out
                if rank and end > start:
                    a = self._matrix(self.offset_a[p, s], rank, features)
                    b = self._matrix(self.offset_b[p, s], rank, out)
                    y = part[rows] + self.scale[p, s].double() * (self.x[rows].double() @ a.T @ b)
                    if self.offset_c[p, s] >= 0:
                        m, n = self._matrix(self.offset_c[p, s], 2, out)
                        y += m * y + n
                    part[rows] = y
        return total

    def with_segments(self, counts: Sequence[tuple[int, int]]) -> "Case":
        """The same rows and adapters with (slot, rows) one behind the other."""
        start = torch.tensor([0, *(count for _, count in counts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        slot = torch.tensor([slot for slot, _ in counts], dtype=torch.int32)
        return replace(self, start=start.to(self.x.device), slot=slot.to(self.x.device))

    def _matrix(self, offset: Tensor, rows: int, columns: int) -> Tensor:
        return self.weights[int(offset) :][: rows * columns].view(rows, columns).double()


def make_case(
    counts: Sequence[tuple[int, int]],
    ranks: Sequence[Sequence[int]],
    features: int,
    out: tuple[int, ...],
    *,
    bare: int = 2,
    aligned: bool = True,
    dora: float = 0.5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """counts: (slot, rows) of each segment. ranks: by projection and slot. dora: share of slots that rescale."""
    num_rows, num_slots = sum(count for _, count in counts), len(ranks[0])
    table = torch.full((3, len(out), num_slots), -1, dtype=torch.int64)
    pieces: list[Tensor] = []
    end = 0
    for p, width in enumerate(out):
        for s in range(num_slots):
            rank = ranks[p][s]
            shapes = ((rank, features), (rank, width), (2, width))
            for kind, shape in enumerate(shapes[: 2 + (random.random() < dora)] if rank else ()):
                gap = -end % 8 if aligned else random.randrange(5)
                table[kind, p, s] = end + gap
                spread = 0.3 if kind == 2 else shape[1 - kind] ** -0.5
                pieces += [torch.full((gap,), NAN), torch.randn(shape).flatten() * spread]
                end += gap + shape[0] * shape[1]
    weights = torch.cat([*pieces, torch.full((3,), NAN)]).to(device, dtype)
    total = num_rows + bare
    row = torch.randperm(total)[:num_rows]
    x, y = torch.full((total, features), NAN), torch.full((total, sum(out)), NAN)
    x[row], y[row] = torch.randn(num_rows, features), torch.randn(num_rows, sum(out))
    offset_a, offset_b, offset_c = table.to(device)
    scale = torch.randn(len(out), num_slots).to(device)
    rank = torch.tensor(ranks, dtype=torch.int32).to(device)
    nothing = torch.empty(0, dtype=torch.int32)
    case = Case(
        y.to(device, dtype), x.to(device, dtype), weights, row.to(device), nothing, nothing,
        offset_a, offset_b, rank, scale, offset_c, out,
    )  # fmt: skip
    return case.with_segments(counts)


def check(case: Case, module: ModuleType, deterministic: bool = False) -> None:
    """Compares the adapted rows with float64, the others bit by bit, and two runs with each other."""
    out = case.run(module, deterministic=deterministic)
    exact = case.exact()
    covered = case.row[: int(case.start[-1])]
    error = (out[covered].double() - exact[covered]).norm() / exact[covered].norm().clamp(min=1e-30)
    assert error < BOUNDS[case.x.dtype], f"relative error {error:.2e}"
    others = torch.ones(len(out), dtype=torch.bool, device=out.device)
    others[covered] = False
    assert torch.equal(out[others].isnan(), case.y[others].isnan()), "a row of no adapter changed"
    assert torch.equal(case.run(module, deterministic=deterministic).nan_to_num(), out.nan_to_num())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_each_row_gets_its_own_adapters_update_at_its_true_rank(
    seed: int, interpreted: ModuleType, aligned: bool, deterministic: bool
) -> None:
    ranks = [[1, 0, 40, 8], [16, 0, 5, 0], [0, 3, 20, 1]]
    counts = [(0, 1), (1, 0), (1, 3), (2, 18), (3, 0), (3, 2), (0, 0)]
    check(make_case(counts, ranks, 64, (48, 16, 24), aligned=aligned), interpreted, deterministic)


def test_sizes_that_divide_no_tile(seed: int, interpreted: ModuleType) -> None:
    check(make_case([(1, 2), (0, 1)], [[3, 130]], 33, (21,), aligned=False), interpreted)
    check(make_case([(0, 1)], [[70], [2]], 1, (1, 7), aligned=False), interpreted)


def test_half_precision(seed: int, interpreted: ModuleType) -> None:
    ranks = [[random.choice([1, 8, 17]) for _ in range(3)] for _ in range(2)]
    check(make_case([(0, 2), (2, 1), (1, 1)], ranks, 72, (40, 24), dtype=torch.float16), interpreted)


def test_many_rows_in_large_tiles_with_all_projections_in_one_program(seed: int, interpreted: ModuleType) -> None:
    many = replace(interpreted.CONFIGS["many", 90], block_k=32, block_n=32, shrink_ranks=16)
    with interpreted.override(many):
        check(make_case([(1, 70), (0, 3), (1, 64)], [[2, 20], [0, 8], [18, 1]], 80, (40, 16, 16)), interpreted)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("rows", "block_n", "blocks"), [(16, 16, 2), (16, 32, 1), (64, 16, 4)])
def test_programs_that_walk_over_their_columns(
    seed: int, interpreted: ModuleType, aligned: bool, rows: int, block_n: int, blocks: int
) -> None:
    walk = replace(interpreted.CONFIGS["long", 90], block_k=32)
    cuts = replace(walk, expand_rows=rows, block_n=block_n, blocks=blocks)
    ranks = [[1, 0, 40, 8], [16, 0, 5, 0], [0, 3, 20, 1]]
    with interpreted.override(cuts):
        counts = [(0, 1), (1, 0), (2, rows + 2), (3, 2)]
        check(make_case(counts, ranks, 40, (200, 16, 24), aligned=aligned), interpreted)


def test_a_share_of_several_steps(seed: int, interpreted: ModuleType) -> None:
    cuts = replace(interpreted.CONFIGS["few", 90], block_k=16, splits=3, block_n=16)
    assert cuts.steps(100) == (3, 3)
    with interpreted.override(cuts):
        check(make_case([(0, 17), (1, 1)], [[4, 40]], 100, (40,)), interpreted)


@pytest.mark.parametrize("aligned", [False, True])
def test_no_more_rows_than_segments(seed: int, interpreted: ModuleType, aligned: bool) -> None:
    ranks = [[1, 0, 40, 8], [16, 0, 5, 0], [0, 3, 20, 1]]
    lone, each = [(2, 1), (0, 1)], [(0, 1), (1, 0), (1, 3), (2, 1), (3, 0), (3, 2), (0, 0)]
    for counts, kind in ((lone, "one"), (each, "each"), (each, "mixed")):
        cuts = interpreted.CONFIGS[kind, 90]
        assert cuts.shrink_rows == cuts.expand_rows == 1
        with interpreted.override(cuts):
            check(make_case(counts, ranks, 64, (48, 16, 24), aligned=aligned), interpreted)


def test_many_rows_or_columns_go_to_the_cuts_that_were_quickest() -> None:
    assert [kind_of("lora", rows, 8, columns=columns) for rows in (64, 1024, 2048) for columns in (0.3, 1.5, 7)] == [
        *("few", "few", "wide"), *("walk", "walk", "walk"), *("deep", "long", "long"),
    ]  # fmt: skip
    assert [kind_of("bottleneck", rows, 8) for rows in (64, 1024, 2048)] == ["group", "some", "many"]


def test_single_rows_go_to_the_cuts_that_were_quickest() -> None:
    assert [kind_of("lora", 1, 1), kind_of("bottleneck", 1, 1)] == ["group", "one"]
    assert {kind_of(operation, 64, 64) for operation in get_args(Operation)} == {"each"}
    assert [kind_of(operation, 257, 512) for operation in ("lora", "bottleneck")] == ["mixed", "some"]
    assert [kind_of("lora", rows, 256, columns=7) for rows in (128, 512, 768, 1024)] == [
        "each",
        "mixed",
        "wide",
        "wide",
    ]
    assert [kind_of("lora", rows, 64) for rows in (128, 129, 512)] == ["each", "crowd", "walk"]
    assert [kind_of("bottleneck", rows, 64) for rows in (64, 128, 129)] == ["each", "each", "group"]
    assert {kind_of(operation, 1, 1, deterministic=True) for operation in get_args(Operation)} == {"steady"}


def test_padded_tails_and_tables_without_rows_change_nothing(seed: int, interpreted: ModuleType) -> None:
    case = make_case([(0, 5)], [[4, 4]], 32, (16,))
    check(case.with_segments([(0, 2), (1, 1), *[(0, 0)] * 130]), interpreted)
    empty = case.with_segments([(0, 0), (0, 0)])
    assert torch.equal(empty.run(interpreted).nan_to_num(), case.y.nan_to_num())
    nothing = replace(empty.with_segments([]), row=case.row[:0])
    assert torch.equal(nothing.run(interpreted).nan_to_num(), case.y.nan_to_num())


def test_deterministic_rows_are_the_same_alone_and_in_another_place(seed: int, interpreted: ModuleType) -> None:
    case = make_case([(0, 19), (1, 2)], [[20, 4]], 64, (32,), bare=0)
    mixed = case.run(interpreted, deterministic=True)
    for position in (0, 7, 18):
        alone = replace(case, row=case.row[position : position + 1]).with_segments([(0, 1)])
        row = int(case.row[position])
        assert torch.equal(alone.run(interpreted, deterministic=True)[row], mixed[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 200, 1000, 4096])
def test_full_size(seed: int, compiled: ModuleType, dtype: torch.dtype, deterministic: bool, num_rows: int) -> None:
    rng = random.Random(seed)
    num_slots = min(num_rows, 9)
    cuts = sorted(rng.randint(0, num_rows) for _ in range(num_slots - 1))
    counts = [(s, b - a) for s, (a, b) in enumerate(pairwise([0, *cuts, num_rows]))] + [(0, 0)] * 5
    for features, out in (
        (4096, (4096, 1024, 1024)),
        (4096, (14336, 14336)),
        (14336, (4096,)),
        (1536, (1536, 256, 256)),
    ):
        ranks = [[rng.choice([0, 1, 8, 16, 33, 64, 128]) for _ in range(num_slots)] for _ in out]
        case = make_case(counts, ranks, features, out, dtype=dtype, device="cuda")
        check(case, compiled, deterministic)


@pytest.mark.gpu
def test_a_graph_follows_its_tables(seed: int, compiled: ModuleType) -> None:
    case = make_case(
        [(0, 20), (1, 0), (2, 12)], [[8, 16, 64]] * 3, 4096, (4096, 1024, 1024), dtype=torch.bfloat16, device="cuda"
    )
    case.run(compiled)
    y, row_slot, graph = case.y.clone(), case.row_slot, torch.cuda.CUDAGraph()
    tables = (case.offset_a, case.offset_b, case.rank, case.scale, case.offset_c)
    with torch.cuda.graph(graph):
        compiled.grouped_lora(y, case.x, case.weights, case.row, case.start, case.slot, row_slot, *tables, case.out)
    for counts in ([(1, 32), (0, 0), (0, 0)], [(2, 1), (0, 30), (0, 0)], [(0, 0)] * 3):
        other = case.with_segments(counts)
        case.start.copy_(other.start)
        row_slot.copy_(other.row_slot)
        case.slot.copy_(other.slot)
        y.copy_(case.y)
        graph.replay()
        assert torch.equal(y.nan_to_num(), other.run(compiled).nan_to_num())


@pytest.mark.gpu
def test_lengths_compile_nothing_new(seed: int, compiled: ModuleType) -> None:
    def count() -> int:
        return sum(
            len(cache[0])
            for kernel in (compiled._shrink, compiled._expand, compiled.expand_walk)
            for cache in kernel.device_caches.values()
        )

    warm, lengths = (
        [[(0, 3), (1, 2)], [(0, 1), (1, 1)], [(1, 1)] * 6],
        [[(0, 1)], [(1, 8)], [(0, 2)] * 4, [(1, 1)] * 16],
    )
    kinds = [
        {kind_of("lora", sum(rows for _, rows in counts), len(counts)) for counts in cases} for cases in (warm, lengths)
    ]
    assert kinds[0] == kinds[1]
    for counts in warm:
        make_case(counts, [[8, 16]], 512, (512,), dtype=torch.bfloat16, device="cuda").run(compiled)
    before = count()
    assert before
    for counts in lengths:
        make_case(counts, [[8, 1]], 512, (512,), dtype=torch.bfloat16, device="cuda").run(compiled)
    assert count() == before
