"""The optimiser's groups and its learning rate."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from peftkit.recipe import Optim
from peftkit.train.optim import build_optimizer, learning_rate, moments, set_lr, set_moments


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


def matrices(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_moments_in_8_bits_over_one_tensor_have_the_bits_of_bitsandbytes_tensor_by_tensor(seed: int) -> None:
    from bitsandbytes.optim import AdamW8bit

    shapes = ((64, 96), (70, 61), (16,), (3, 1000), (128, 33))  # some no whole number of blocks, some small
    ours = matrices(*shapes)
    named = {str(number): parameter for number, parameter in enumerate(ours)}
    apart = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings = Optim(name="adamw_8bit", lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(settings, named, {"1": 4.0})
    groups = [{"params": [p for n, p in enumerate(apart) if n != 1]}, {"params": [apart[1]]}]
    reference = AdamW8bit(groups, lr=1e-2, betas=settings.betas, weight_decay=0.1)
    for step in range(6):
        rate = 1e-2 / (1 + step)
        set_lr(optimizer, rate)
        for group, factor in zip(reference.param_groups, (1.0, 4.0), strict=True):
            group["lr"] = rate * factor
        for one, other in zip(ours, apart, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        assert all(torch.equal(one, other) and one.grad is None for one, other in zip(ours, apart, strict=True))
        if step == 2:  # as a run that goes on from a checkpoint
            saved = {key: value.clone() for key, value in moments(optimizer, named).items()}
            optimizer = build_optimizer(settings, named, {"1": 4.0})
            set_moments(optimizer, named, saved)
            again = moments(optimizer, named)
            assert again.keys() == saved.keys() and all(torch.equal(again[key], saved[key]) for key in saved)
    kept = moments(optimizer, named)
    assert kept["0/state1"].shape == (64, 96) and kept["0/state1"].dtype == torch.uint8
    assert kept["1/absmax1"].shape == (17,) and kept["2/state1"].dtype == torch.float32
