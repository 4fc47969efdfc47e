"""The optimiser's groups, its learning rate, and the weights that come of its steps."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from peftkit.data import Dataset, plan_epoch
from peftkit.recipe import Optim, Recipe
from peftkit.train import train
from peftkit.train.optim import build_optimizer, learning_rate, moments, set_lr, set_moments
from peftkit.train.prepare import prepare
from peftkit.train.speed import flops_rate, mfu


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


@pytest.mark.parametrize("repetition", range(4))  # one in eight gradients tells what lies between parameters
def test_moments_in_8_bits_over_one_tensor_have_the_bits_of_bitsandbytes_tensor_by_tensor(
    seed: int, repetition: int
) -> None:
    from bitsandbytes.optim import AdamW8bit

    torch.manual_seed(seed + repetition)
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


def adamw_by_hand(recipe: Recipe, max_norm: float) -> dict[str, Tensor]:
    """A run's weights by AdamW as its paper writes it, in float64, over transformers' own losses."""
    prepared = prepare(recipe)
    assert isinstance(prepared.train, Dataset) and recipe.train.max_steps is not None
    samples, settings = prepared.train.samples, recipe.optim
    plan = plan_epoch(prepared.train.lengths, seed=0, epoch=0, batch_tokens=0, batch_size=4)
    moments = {name: [torch.zeros_like(p, dtype=torch.float64)] * 2 for name, p in prepared.parameters.items()}
    beta1, beta2 = settings.betas
    for step in range(recipe.train.max_steps):
        summed, count = torch.zeros(()), 0
        for row in plan[step]:
            ids = torch.from_numpy(samples[row].ids).long()
            losses = F.cross_entropy(prepared.model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")
            trained = torch.from_numpy(samples[row].trained[1:])
            summed, count = summed + losses[trained].sum(), count + int(trained.sum())
        grads = torch.autograd.grad(summed / count, list(prepared.parameters.values()))
        norm = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in grads))
        lr = learning_rate(settings, step, recipe.train.max_steps)
        for (name, parameter), grad in zip(prepared.parameters.items(), grads, strict=True):
            g = grad.double() * min(1.0, max_norm / norm)
            m, v = moments[name] = [
                beta1 * moments[name][0] + (1 - beta1) * g,
                beta2 * moments[name][1] + (1 - beta2) * g**2,
            ]
            m, v = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
            with torch.no_grad():
                parameter.copy_(parameter * (1 - lr * settings.weight_decay) - lr * m / (v.sqrt() + 1e-8))
    return {name: parameter.detach().double() for name, parameter in prepared.parameters.items()}


def test_a_runs_weights_are_those_of_adamw_over_clipped_gradients(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(
        data={"packing": False},
        optim={"lr": 0.02, "weight_decay": 0.1, "max_grad_norm": 0.3, "betas": (0.8, 0.9), "schedule": "linear"},
    )
    train(recipe)
    trained = {name: w.double() for name, w in load_file(Path(recipe.out) / "state/step-6/adapter.safetensors").items()}

    def distance(others: dict[str, Tensor]) -> float:
        assert others.keys() == trained.keys()
        return max(float((trained[name] - others[name]).norm() / others[name].norm()) for name in trained)

    assert distance(adamw_by_hand(recipe, 0.3)) < 1e-3
    assert distance(adamw_by_hand(recipe, math.inf)) > 1e-2


def test_the_share_of_a_gpus_arithmetic_is_that_of_the_products_with_the_base() -> None:
    # 2 · 10⁹ weights at 50 000 tokens a second: 4 · 10¹⁴ of 989 · 10¹² operations
    assert mfu(2 * 10**9, 50_000, 989e12) == pytest.approx(4e14 / 989e12)
    assert flops_rate(torch.device("cpu"), 1) is None
