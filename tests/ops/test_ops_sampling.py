"""Sampling: the sets that the filters keep, the distribution of draws, and what a draw depends on."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from peftkit_kernels import sample
from peftkit_kernels.reference import uniform


def draw(logits: Tensor, **parameters: Any) -> list[int]:
    """Draws one token a row; a parameter is one number for all rows, or a list."""
    rows = logits.shape[0]

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        value = parameters.get(name, default)
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return sample(
        logits,
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        column("seeds", 0, torch.int64),
        column("steps", 0, torch.int64),
    ).tolist()


def drawn_set(logits_V: Tensor, seed: int, draws: int = 400, **parameters: Any) -> set[int]:
    return set(draw(logits_V.expand(draws, -1), seeds=[seed] * draws, steps=list(range(draws)), **parameters))


def splitmix_uniform(seed: int, step: int) -> float:
    """The definition, in Python's unbounded integers."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    return (mix((mix((seed + gamma) & mask) + step * gamma) & mask) >> 11) / 2**53


def test_the_hash_is_splitmix_in_any_integer_arithmetic(seed: int) -> None:
    rng = random.Random(seed)
    seeds = [rng.randrange(-(2**63), 2**63) for _ in range(500)] + [0, -1, 2**63 - 1, -(2**63)]
    steps = [rng.randrange(2**31) for _ in seeds]
    ours = uniform(torch.tensor(seeds), torch.tensor(steps))
    assert ours.dtype == torch.float64
    assert ours.tolist() == [splitmix_uniform(s % 2**64, t) for s, t in zip(seeds, steps, strict=True)]


@pytest.mark.parametrize("along", ["steps", "seeds"])
def test_hashed_numbers_are_uniform(seed: int, along: str) -> None:
    count, bins = 40000, 100
    fixed, running = torch.full((count,), seed), torch.arange(count)
    u = uniform(fixed, running) if along == "steps" else uniform(running + seed, torch.full((count,), 3))
    assert 0 <= u.min() and u.max() < 1
    observed = torch.histc(u, bins, 0, 1)
    chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
    assert chi_square < bins - 1 + 6 * math.sqrt(2 * (bins - 1)), "six standard deviations"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(seed: int, temperature: float) -> None:
    count, vocab = 20000, 12
    logits = torch.randn(vocab) * 1.5
    tokens = draw(logits.expand(count, -1), temperature=temperature, seeds=seed, steps=list(range(count)))
    wanted = (logits.double() / temperature).softmax(0) * count
    observed = torch.bincount(torch.tensor(tokens), minlength=vocab)
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square < (vocab - 1) + 6 * math.sqrt(2 * (vocab - 1)) + 6, "about a million to one"


def test_filters_renormalise_what_they_keep(seed: int) -> None:
    count = 20000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    tokens = draw(logits.expand(count, -1), top_k=2, seeds=seed, steps=list(range(count)))
    share = tokens.count(0) / count
    assert set(tokens) == {0, 1}
    assert abs(share - 4 / 7) < 6 * math.sqrt(4 / 7 * 3 / 7 / count)


def test_temperature_zero_takes_the_lowest_of_the_likeliest(seed: int) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 3.0, 3.0, 9.0]])
    assert draw(logits, temperature=0.0, top_k=3, top_p=0.1) == [1, 3]


def test_a_tiny_temperature_neither_overflows_nor_strays(seed: int) -> None:
    logits = torch.randn(4, 50) * 100
    assert draw(logits, temperature=1e-30, seeds=seed) == logits.argmax(1).tolist()


def test_top_k_keeps_the_k_largest_and_their_ties(seed: int) -> None:
    logits = torch.tensor([1.0, 0.9, 1.1, 0.9, 0.5])
    assert drawn_set(logits, seed, top_k=1) == {2}
    assert drawn_set(logits, seed, top_k=2) == {0, 2}
    assert drawn_set(logits, seed, top_k=3) == {0, 1, 2, 3}, "1 and 3 tie for the third place"
    assert drawn_set(logits, seed, top_k=5) == drawn_set(logits, seed, top_k=99) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_holds_p(seed: int) -> None:
    logits = torch.tensor([0.2, 0.5, 0.1, 0.16, 0.04]).log()
    assert drawn_set(logits, seed, top_p=0.3) == {1}
    assert drawn_set(logits, seed, top_p=0.6) == {0, 1}
    assert drawn_set(logits, seed, top_p=0.8) == {0, 1, 3}
    assert drawn_set(logits, seed, top_k=3, top_p=0.8) == {0, 1}, "of what top_k keeps, 0.7 / 0.86 is enough"


def test_min_p_drops_what_is_below_a_share_of_the_likeliest(seed: int) -> None:
    logits = torch.tensor([0.2, 0.5, 0.1, 0.16, 0.04]).log()
    assert drawn_set(logits, seed, min_p=0.3) == {0, 1, 3}
    assert drawn_set(logits, seed, min_p=0.99) == {1}
    assert drawn_set(logits, seed, top_p=0.6, min_p=0.3) == {0, 1}


@pytest.mark.parametrize(("vocab", "top_p", "low", "high"), [(3000, 0.9, 512, 8192), (12000, 0.9, 8192, 12000)])
def test_a_nucleus_larger_than_the_first_looks_is_exact(
    seed: int, vocab: int, top_p: float, low: int, high: int
) -> None:
    logits = torch.randn(vocab) * 0.01
    weights, order = logits.double().softmax(0).sort(descending=True)
    count = int((weights.cumsum(0) < top_p).sum()) + 1
    assert low < count < high
    tokens = set(draw(logits.expand(300, -1), top_p=top_p, seeds=seed, steps=list(range(300))))
    assert tokens <= set(order[: count + 1].tolist()), "one more than in float64 at most: p is rounded to float32"


def test_a_draw_depends_on_its_own_row_seed_and_step_alone(seed: int) -> None:
    rng = random.Random(seed)
    rows, vocab = 12, 5000
    logits = torch.randn(rows, vocab) * 3
    parameters: dict[str, list[float]] = {
        "temperature": [rng.choice([0.0, 0.3, 1.0, 1.7]) for _ in range(rows)],
        "top_k": [rng.choice([0, 1, 40, 2000]) for _ in range(rows)],
        "top_p": [rng.choice([1.0, 0.9, 0.2]) for _ in range(rows)],
        "min_p": [rng.choice([0.0, 0.05]) for _ in range(rows)],
        "seeds": [rng.randrange(2**63) for _ in range(rows)],
        "steps": [rng.randrange(1000) for _ in range(rows)],
    }
    together = draw(logits, **parameters)
    for row in rng.sample(range(rows), rows):
        alone = {name: [values[row]] for name, values in parameters.items()}
        assert draw(logits[row : row + 1], **alone) == [together[row]]


def test_rows_that_are_not_finite_draw_nothing_and_leave_others_alone(seed: int) -> None:
    logits = torch.randn(5, 8)
    alone = draw(logits[4:], seeds=seed)
    logits[0, 3], logits[1, 0], logits[3] = float("nan"), float("inf"), float("-inf")
    logits[2, :7] = float("-inf")
    tokens = draw(logits, temperature=[1.0, 1.0, 1.0, 0.0, 1.0], seeds=seed)
    assert tokens == [-1, -1, 7, -1, *alone]
