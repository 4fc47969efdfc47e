"""The grouped bottleneck kernels against float64 row by row: small in Triton's interpreter, full size on a GPU."""

import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

from peftkit_kernels.segments import Segments
from peftkit_kernels.triton.segmented import kind_of

NAN = float("nan")
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
EXACT: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.clamp(min=0),
    lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    lambda x: x / (1 + torch.exp(-x)),
    torch.tanh,
)
FORMS = [(source, function, normed) for normed in (0, 1) for source in range(3) for function in range(5)]


@pytest.fixture
def interpreted(interpreter: Callable[[str], ModuleType]) -> ModuleType:
    """The module, its kernels in Triton's interpreter."""
    return interpreter("bottleneck")


@pytest.fixture
def compiled() -> ModuleType:
    """The module, its kernels compiled."""
    return importlib.import_module("peftkit_kernels.triton.bottleneck")


@dataclass
class Case:
    """Rows by adapter and the adapters; NaN stands between the adapters and in the rows of no adapter."""

    y: Tensor
    residual: Tensor
    weights: Tensor
    row: Tensor
    start: Tensor
    slot: Tensor
    offset: Tensor
    width: Tensor
    scale: Tensor
    form: Tensor

    def run(self, module: ModuleType, *, deterministic: bool = False) -> Tensor:
        """y with the adapters' outputs; a copy."""
        y = self.y.clone()
        tables = (self.offset, self.width, self.scale, self.form)
        row_slot = Segments.of(self.row, self.start, self.slot).row_slot_X
        given = (self.residual, self.weights, self.row, self.start, self.slot, row_slot, *tables)
        assert module.grouped_bottleneck(y, *given, deterministic=deterministic) is y
        return y

    def exact(self) -> Tensor:
        """y in float64; rows of no adapter as they are."""
        total, hidden = self.y.double(), self.y.shape[1]
        for (start, end), s in zip(pairwise(self.start.tolist()), self.slot.tolist(), strict=True):
            width = int(self.width[s])
            if not width or end == start:
                continue
            rows, (source, function, normed) = self.row[start:end], self.form[s].tolist()
            sizes = [width * hidden, width * hidden, hidden, 2 * normed * hidden, width]
            parts = self.weights[int(self.offset[s]) :][: sum(sizes)].double().split(sizes)
            y, stream = total[rows], self.residual[rows].double()
            x = (y, y + stream, stream)[source]
            if normed:
                gain, shift = parts[3].view(2, hidden)
                x = (x - x.mean(1, True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt() * gain + shift
            inner = EXACT[function](x @ parts[0].view(width, hidden).T + parts[4])
            total[rows] = y + self.scale[s].double() * (inner @ parts[1].view(width, hidden) + parts[2])
        return total

    def with_segments(self, counts: Sequence[tuple[int, int]]) -> "Case":
        """The same rows and adapters with (slot, rows) one behind the other."""
        start = torch.tensor([0, *(count for _, count in counts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        slot = torch.tensor([slot for slot, _ in counts], dtype=torch.int32)
        return replace(self, start=start.to(self.y.device), slot=slot.to(self.y.device))


def make_case(
    counts: Sequence[tuple[int, int]],
    adapters: Sequence[tuple[int, tuple[int, int, int]]],
    hidden: int,
    *,
    bare: int = 2,
    aligned: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """counts: (slot, rows) of each segment. adapters: width and form of each slot."""
    num_rows = sum(count for _, count in counts)
    offsets: list[int] = []
    pieces: list[Tensor] = []
    end = 0
    for width, (_, _, normed) in adapters:
        gap = -end % 8 if aligned else random.randrange(5)
        down, up = (torch.randn(width * hidden) * size**-0.5 for size in (hidden, max(width, 1)))
        norm = torch.stack((1 + torch.randn(hidden) / 4, torch.randn(hidden) / 4)).flatten()[: 2 * normed * hidden]
        parts = [torch.full((gap,), NAN), down, up, torch.randn(hidden), norm, torch.randn(width)]
        offsets.append(end + gap if width else -1)
        pieces += parts if width else []
        end += sum(part.numel() for part in parts) if width else 0
    weights = torch.cat([*pieces, torch.full((3,), NAN)]).to(device, dtype)
    row = torch.randperm(num_rows + bare)[:num_rows]
    y, residual = torch.full((num_rows + bare, hidden), NAN), torch.full((num_rows + bare, hidden), NAN)
    y[row], residual[row] = torch.randn(num_rows, hidden), torch.randn(num_rows, hidden) + 3
    tables = (
        torch.tensor(offsets),
        torch.tensor([width for width, _ in adapters], dtype=torch.int32),
        torch.randn(len(adapters)),
        torch.tensor([form for _, form in adapters], dtype=torch.int32),
    )
    nothing = torch.zeros(0, dtype=torch.int32)
    rows = (y.to(device, dtype), residual.to(device, dtype), weights, row.to(device))
    case = Case(*rows, nothing, nothing, *(table.to(device) for table in tables))
    return case.with_segments(counts)


def check(case: Case, module: ModuleType, deterministic: bool = False) -> None:
    """Compares the adapted rows with float64, the others bit by bit, and two runs with each other."""
    stream = case.residual.clone()
    out = case.run(module, deterministic=deterministic)
    exact = case.exact()
    covered = case.row[: int(case.start[-1])]
    error = (out[covered].double() - exact[covered]).norm() / exact[covered].norm().clamp(min=1e-30)
    assert error < BOUNDS[case.y.dtype], f"relative error {error:.2e}"
    others = torch.ones(len(out), dtype=torch.bool, device=out.device)
    others[covered] = False
    assert torch.equal(out[others].nan_to_num(), case.y[others].nan_to_num()), "a row of no adapter changed"
    assert torch.equal(stream.nan_to_num(), case.residual.nan_to_num())
    assert torch.equal(case.run(module, deterministic=deterministic)[covered], out[covered])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_each_row_gets_its_own_adapter_of_its_own_form_and_width(
    seed: int, interpreted: ModuleType, aligned: bool, deterministic: bool
) -> None:
    rng = random.Random(seed)
    forms = [form for form in FORMS if form[0] == (0 if aligned else 1) + deterministic]
    adapters = [(rng.choice([1, 5, 16, 40]), form) for form in forms] + [(0, FORMS[0])]
    counts = [(s, rng.choice([0, 1, 1, 2])) for s in range(len(adapters))] + [(0, 18), (1, 0)]
    check(make_case(counts, adapters, 48, aligned=aligned), interpreted, deterministic)


@pytest.mark.parametrize("function", range(5))
@pytest.mark.parametrize("normed", [0, 1])
def test_every_non_linearity_with_and_without_a_norm(
    seed: int, interpreted: ModuleType, function: int, normed: int
) -> None:
    check(make_case([(0, 2), (1, 1)], [(9, (0, function, normed)), (4, (2, function, normed))], 24), interpreted)


def test_sizes_that_divide_no_tile(seed: int, interpreted: ModuleType) -> None:
    check(make_case([(0, 2), (1, 1)], [(130, (1, 3, 1)), (1, (0, 1, 0))], 33, aligned=False), interpreted)
    check(make_case([(0, 1)], [(70, (0, 4, 0))], 2, aligned=False), interpreted)


def test_half_precision(seed: int, interpreted: ModuleType) -> None:
    adapters = [(8, (0, 0, 0)), (17, (1, 1, 1)), (3, (2, 2, 0))]
    check(make_case([(0, 2), (2, 1), (1, 2)], adapters, 72, dtype=torch.float16), interpreted)


def test_many_rows_in_large_tiles(seed: int, interpreted: ModuleType) -> None:
    with interpreted.override(replace(interpreted.CONFIGS["many", 90], block_k=32, block_n=32)):
        check(make_case([(1, 70), (0, 3)], [(8, (1, 0, 1)), (40, (0, 3, 0))], 80), interpreted)


@pytest.mark.parametrize("aligned", [False, True])
def test_no_more_rows_than_segments(seed: int, interpreted: ModuleType, aligned: bool) -> None:
    adapters = [(40, (0, 1, 1)), (0, (0, 0, 0)), (1, (2, 3, 0)), (17, (1, 0, 1))]
    for counts in ([(0, 1), (3, 1)], [(0, 1), (1, 0), (1, 1), (2, 0), (3, 3), (2, 1), (0, 0)]):
        check(make_case(counts, adapters, 48, aligned=aligned), interpreted)


@pytest.mark.parametrize("most", [4, 32, 256])
def test_cuts_of_tiles_of_one_row_make_the_same_sums(seed: int, interpreted: ModuleType, most: int) -> None:
    adapters = [(130, (1, 3, 1)), (0, (0, 0, 0)), (20, (2, 1, 0))]
    cuts = replace(interpreted.ROWS[most], block_k=64)
    with interpreted.override(cuts):
        check(make_case([(0, 1), (1, 0), (2, 1), (1, 1)], adapters, 72), interpreted)


def test_padded_tails_and_tables_without_rows_change_nothing(seed: int, interpreted: ModuleType) -> None:
    case = make_case([(0, 5)], [(4, (0, 0, 0)), (6, (1, 1, 1))], 32)
    check(case.with_segments([(0, 2), (1, 1), (0, 0), (1, 0)]), interpreted)
    empty = case.with_segments([(0, 0), (1, 0)])
    assert torch.equal(empty.run(interpreted).nan_to_num(), case.y.nan_to_num())
    nothing = replace(empty.with_segments([]), row=case.row[:0])
    assert torch.equal(nothing.run(interpreted).nan_to_num(), case.y.nan_to_num())


def test_deterministic_rows_are_the_same_alone_and_in_another_place(seed: int, interpreted: ModuleType) -> None:
    case = make_case([(0, 19), (1, 2)], [(20, (1, 1, 1)), (4, FORMS[0])], 64, bare=0)
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
    for hidden in (4096, 1536, 4099):
        adapters = [(rng.choice([0, 1, 33, 64, 256]), rng.choice(FORMS)) for _ in range(num_slots)]
        check(make_case(counts, adapters, hidden, dtype=dtype, device="cuda"), compiled, deterministic)


@pytest.mark.gpu
def test_lengths_compile_nothing_new(seed: int, compiled: ModuleType) -> None:
    def count() -> int:
        kernels = (compiled._down, compiled._down_rows, compiled._up)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    adapters = [(8, (0, 1, 1)), (16, (1, 0, 0))]
    warm, lengths = (
        [[(0, 3), (1, 2)], [(0, 1), (1, 1)], [(1, 1)] * 6],
        [[(0, 1)], [(1, 8)], [(0, 2)] * 4, [(1, 1)] * 16],
    )
    kinds = [
        {kind_of("bottleneck", sum(rows for _, rows in counts), len(counts)) for counts in cases}
        for cases in (warm, lengths)
    ]
    assert kinds[0] == kinds[1]
    for counts in warm:
        make_case(counts, adapters, 512, dtype=torch.bfloat16, device="cuda").run(compiled)
    before = count()
    assert before
    for counts in lengths:
        make_case(counts, adapters, 512, dtype=torch.bfloat16, device="cuda").run(compiled)
    assert count() == before
