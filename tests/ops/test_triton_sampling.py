"""The sampling kernels draw the reference's tokens: small in Triton's interpreter, at full size on a GPU."""

import math
import random
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from peftkit_kernels import reference

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

Interpreter = Callable[[str], ModuleType]


def parameters(rng: random.Random, rows: int, vocab: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Temperature, top-k, top-p, min-p, seed and step, a mixture of all kinds."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor([rng.choice(values) for _ in range(rows)], dtype=dtype, device=device)

    return (
        column([0.0, 0.3, 1.0, 1.0, 1.7, 1e-30], torch.float32),
        column([0, 0, 1, 5, vocab // 3, vocab, vocab + 9], torch.int32),
        column([1.0, 1.0, 0.9, 0.5, 0.01], torch.float32),
        column([0.0, 0.0, 0.05, 0.5, 1.0], torch.float32),
        torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(rows)], device=device),
        torch.tensor([rng.randrange(2**40) for _ in range(rows)], device=device),
    )


def check(module: ModuleType, logits: Tensor, columns: tuple[Tensor, ...]) -> None:
    tokens = module.sample(logits, *columns)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == reference.sample(logits, *columns).tolist()
    assert torch.equal(module.sample(logits, *columns), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 5), (8, 60)])
def test_draws_the_tokens_of_the_reference(
    seed: int, interpreter: Interpreter, rows: int, vocab: int, dtype: torch.dtype
) -> None:
    rng = random.Random(seed)
    check(interpreter("sampling"), (torch.randn(rows, vocab) * 3).to(dtype), parameters(rng, rows, vocab))


@pytest.mark.parametrize("few", [4, 16])
def test_chunks_and_groups_of_a_row_add_up(
    seed: int, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    module = interpreter("sampling")
    for name, size in {"_CHUNK": 16, "_PEAK_CHUNK": 16, "_GROUP": 4, "_FEW_GROUPS": few, "_LIMIT_BLOCK": 32}.items():
        monkeypatch.setattr(module, name, size)
    check(module, torch.randn(12, 71) * 2, parameters(random.Random(seed), 12, 71))


def test_ties_are_kept_and_the_lowest_id_is_greedy(seed: int, interpreter: Interpreter) -> None:
    rng = random.Random(seed)
    logits = torch.randint(-2, 3, (10, 30)).float() * 0.5
    logits[logits == 0] *= torch.randint(0, 2, (int((logits == 0).sum()),)) * 2 - 1.0  # zeros of both signs are equal
    check(interpreter("sampling"), logits, parameters(rng, 10, 30))


def test_rows_that_are_not_finite_draw_nothing(interpreter: Interpreter) -> None:
    logits = torch.zeros(6, 8)
    logits[0, 3], logits[1, 0], logits[3] = math.nan, math.inf, -math.inf
    logits[2, :7] = -math.inf
    logits[4, 1] = math.nan
    ones, zeros = torch.ones(6), torch.zeros(6)
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    integers = torch.zeros(6, dtype=torch.int64)
    tokens = interpreter("sampling").sample(logits, temperature, zeros.int(), ones, zeros, integers, integers)
    assert tokens.tolist() == [-1, -1, 7, -1, -1, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1000, 49152, 128256, 262144])
def test_draws_the_tokens_of_the_reference_on_a_gpu(seed: int, vocab: int, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import sampling

    rng = random.Random(seed)
    for spread in (0.01, 1.0, 4.0):
        logits = (torch.randn(48, vocab, device="cuda") * spread).to(dtype)
        columns = parameters(rng, 48, vocab, "cuda")
        tokens = sampling.sample(logits, *columns)
        assert torch.equal(sampling.sample(logits, *columns), tokens)
        wanted = reference.sample(logits.cpu(), *(column.cpu() for column in columns))
        # the sum that top-p is a share of is float32: its limit may be another one of many nearly equal logits
        differs = (tokens.cpu() != wanted).nonzero()[:, 0]
        heat, top_k, top_p, *others = (column.cpu()[differs] for column in columns)
        assert len(differs) < 5 and (top_p < 1).all()
        less, more = (
            reference.sample(logits.cpu()[differs], heat, top_k, top_p * share, *others)
            for share in (1 - 1e-6, 1 + 1e-6)
        )
        drawn = tokens.cpu()[differs]
        assert ((drawn == less) | (drawn == more)).all()
