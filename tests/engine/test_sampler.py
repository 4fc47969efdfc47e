"""Draws by a request's own parameters: seeds of any size, and rows that are independent of each other."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from peftkit.errors import InputError
from peftkit_serve import sampler
from peftkit_serve.plan import Sample
from peftkit_serve.request import SamplingParams


def draw(logits_NV: torch.Tensor, samples: list[Sample]) -> list[int]:
    return sampler.draw(logits_NV, samples).tolist()


def test_each_row_is_drawn_by_its_own_parameters(seed: int) -> None:
    logits = torch.tensor([0.1, 5.0, 4.9, 1.0]).repeat(60, 1)
    greedy, top = SamplingParams(temperature=0.0), SamplingParams(top_k=2)
    wide, narrow = SamplingParams(temperature=2.0), SamplingParams(temperature=2.0, min_p=0.9)
    kinds = [greedy, top, wide, narrow, SamplingParams(top_p=0.5), SamplingParams(top_p=0.7)]
    tokens = draw(logits, [Sample(kinds[n % 6], seed, n) for n in range(60)])
    sets = [set(tokens[kind::6]) for kind in range(6)]
    assert sets[0] == {1} and sets[4] == {1}
    assert sets[1] <= {1, 2} and sets[3] <= {1, 2} and sets[5] <= {1, 2}
    assert sets[1] | sets[3] | sets[5] == {1, 2}


def test_a_row_draws_the_same_token_in_any_batch(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(20, 300) * 2
    samples = [Sample(SamplingParams(top_p=0.95), rng.randrange(2**64), rng.randrange(50)) for _ in range(20)]
    together = draw(logits, samples)
    for _ in range(5):
        rows = rng.sample(range(20), rng.randint(1, 20))
        assert draw(logits[rows], [samples[row] for row in rows]) == [together[row] for row in rows]


def test_steps_of_a_request_are_drawn_independently(seed: int) -> None:
    logits = torch.zeros(2000, 10)
    tokens = draw(logits, [Sample(SamplingParams(), seed, step) for step in range(2000)])
    pairs = torch.zeros(10, 10)
    for first, second in pairwise(tokens):
        pairs[first, second] += 1
    chi_square = float(((pairs - 19.99) ** 2 / 19.99).sum())
    assert chi_square < 99 + 6 * 99**0.5 * 2**0.5, "six standard deviations"


@pytest.mark.parametrize("value", [0, -1, 2**63, 2**64 - 1, -(2**63), 12345678901234567890123])
def test_seeds_of_any_size_draw_as_their_64_bits_do(seed: int, value: int) -> None:
    logits = torch.randn(1, 5000)
    params = SamplingParams()
    assert draw(logits, [Sample(params, value, 3)]) == draw(logits, [Sample(params, value % 2**64, 3)])


def test_neighbouring_seeds_draw_differently(seed: int) -> None:
    logits = torch.zeros(200, 5000)
    tokens = draw(logits, [Sample(SamplingParams(), seed + n, 0) for n in range(200)])
    assert len(set(tokens)) > 180


def test_logits_that_are_not_finite_draw_minus_one() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = float("nan")
    assert draw(logits, [Sample(SamplingParams(), 1, 0)] * 2)[0] == -1


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 10**9], [0]),
        ("temperature", [0.0, 2.0], [-0.1, 2.1]),
        ("top_p", [0.001, 1.0], [0.0, 1.1]),
        ("top_k", [0, 2**31 - 1], [-1, 2**31]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
        ("stop", [(), ("a",) * 16], [("",), ("a",) * 17]),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert draw(torch.tensor([[0.0, 9.0]]), [Sample(SamplingParams(**{field: value}), 0, 0)])[0] in (0, 1)
    for value in bad:
        with pytest.raises(InputError, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
