"""The optimiser and the learning rate, which is a function of the step alone: nothing of it needs saving."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.errors import RecipeError
from peftkit.recipe import Optim
from peftkit.train.eight_bit import FlatAdamW8bit

FACTOR = "lr_factor"
_PAGED = "paged_adamw_8bit"


def build_optimizer(
    settings: Optim, parameters: Mapping[str, nn.Parameter], lr_factors: Mapping[str, float]
) -> torch.optim.Optimizer:
    """AdamW over the adapter's float32 parameters; `set_lr` gives it its learning rate before each step.

    `lr_factors` are on the learning rate, by name, of those parameters that have one: a group for each factor. Raises
    RecipeError for paged moments where there is no GPU to page them out of.
    """
    members: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        members.setdefault(lr_factors.get(name, 1.0), []).append(parameter)
    groups = [{"params": params, FACTOR: factor} for factor, params in members.items()]
    shared: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.name in ("auto", "adamw"):
        # on two CPU cores a fused step over 420 LoRA matrices takes 4 ms instead of 17
        return torch.optim.AdamW(groups, **shared, fused=True)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    check_paged(settings)
    make: Any = PagedAdamW8bit if settings.name == _PAGED else AdamW8bit
    return FlatAdamW8bit(groups, lambda laid_out: make(laid_out, **shared))


def check_paged(settings: Optim) -> None:
    """Raises RecipeError for paged moments where there is no GPU to page them out of."""
    if settings.name == _PAGED and not torch.cuda.is_available():
        raise RecipeError(
            f"optim.name: {_PAGED} pages moments out of a GPU's memory, and there is no GPU: use adamw_8bit",
            field="optim.name",
        )


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the optimiser remembers of each parameter, by `parameter/field`."""
    return {
        f"{name}/{field}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for field, value in _remembered(optimizer, parameter).items()
    }


def set_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]
) -> None:
    """Puts back what `moments` gave, in the place of all that the optimiser remembers."""
    optimizer.state.clear()
    known = [parameters[name] for name in dict.fromkeys(key.rpartition("/")[0] for key in saved)]
    if isinstance(optimizer, FlatAdamW8bit):
        optimizer.begin(known)
    for key, value in saved.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        match _remembered(optimizer, parameter).get(field):
            case Tensor() as held:
                held.copy_(value)
            case None:
                optimizer.state[parameter][field] = value.to(parameter.device)
            case _:
                _state(optimizer, parameter)[field] = value.item()


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """What is remembered of a parameter, or of the flat tensor that it is a part of."""
    place = optimizer.places.get(parameter) if isinstance(optimizer, FlatAdamW8bit) else None
    return optimizer.state[parameter if place is None else place.flat]


def _remembered(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The parameter's part of it, without bitsandbytes' constant tables."""
    state = {field: value for field, value in _state(optimizer, parameter).items() if not field.startswith("qmap")}
    place = optimizer.places.get(parameter) if isinstance(optimizer, FlatAdamW8bit) else None
    if place is None:
        return state
    return {
        field: place.of(field, value, parameter) if isinstance(value, Tensor) else value
        for field, value in state.items()
    }


def learning_rate(settings: Optim, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 0) of `total_steps`.

    It rises linearly over ⌈warmup · total⌉ steps, the last of which has the peak; then it stays, or falls towards 0
    along a line or half a cosine.
    """
    warmup_steps = math.ceil(settings.warmup * total_steps)
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    match settings.schedule:
        case "constant":
            return settings.lr
        case "linear":
            return settings.lr * (1 - done)
        case "cosine":
            return settings.lr * (1 + math.cos(math.pi * done)) / 2


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group, times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[FACTOR]
