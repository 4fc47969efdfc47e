"""The optimiser's groups and its learning rate."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from peftkit.recipe import Optim
from peftkit.train.optim import build_optimizer, learning_rate, set_lr


def test_a_factor_multiplies_the_rate_of_its_parameter_alone(seed: int) -> None:
    parameters = {name: nn.Parameter(torch.randn(5)) for name in ("a", "b", "c")}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = build_optimizer(Optim(lr=1e-3, weight_decay=0.0), parameters, {"b": 16.0})
    set_lr(optimizer, 2e-3)
    for parameter in parameters.values():
        parameter.grad = torch.randn(5)
    optimizer.step()
    # Adam's first step is the learning rate in size, whatever the gradient
    moved = {name: (parameter - before[name]).abs().mean().item() for name, parameter in parameters.items()}
    assert moved == pytest.approx({"a": 2e-3, "b": 32e-3, "c": 2e-3}, rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", [0.5, 1, *((1 + math.cos(math.pi * i / 8)) / 2 for i in range(8))]),
    ],
)
def test_learning_rate_rises_to_its_peak_and_then_follows_its_schedule(schedule: Any, expected: list[float]) -> None:
    settings = Optim(lr=3.0, warmup=0.15, schedule=schedule)
    rates = [learning_rate(settings, step, 10) for step in range(10)]
    assert rates == pytest.approx([3.0 * share for share in expected])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(Optim(lr=2.0, warmup=0.0), 0, 1) == 2.0
