"""The optimiser's groups."""

import pytest
import torch
from torch import nn

from peftkit.recipe import Optim
from peftkit.train.optim import build_optimizer, set_lr


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
