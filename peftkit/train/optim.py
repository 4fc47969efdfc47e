"""The optimiser and the learning rate, which is a function of the step alone: nothing of it needs saving."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.errors import RecipeError
from peftkit.recipe import Optim

FACTOR = "lr_factor"


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

    if settings.name == "adamw_8bit":
        return AdamW8bit(groups, **shared)
    if not torch.cuda.is_available():
        raise RecipeError(
            "optim.name: paged_adamw_8bit pages moments out of a GPU's memory, and there is no GPU: use adamw_8bit",
            field="optim.name",
        )
    return PagedAdamW8bit(groups, **shared)


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the optimiser remembers of each parameter, by `parameter/field`."""
    return {
        f"{name}/{field}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for field, value in optimizer.state.get(parameter, {}).items()
        if not field.startswith("qmap")  # bitsandbytes' constant table
    }


def set_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]
) -> None:
    """Puts back what `moments` gave, in the place of all that the optimiser remembers."""
    optimizer.state.clear()
    known = {id(parameters[key.rpartition("/")[0]]) for key in saved}
    begin: Any = getattr(optimizer, "init_state", None)  # bitsandbytes': with its tables, and paged where it pages
    if begin is not None:
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in known:
                    begin(group, parameter, index, place)
    for key, value in saved.items():
        name, _, field = key.rpartition("/")
        parameter = parameters[name]
        state = optimizer.state[parameter]
        match state.get(field):
            case None:
                state[field] = value.to(parameter.device)
            case Tensor() as held:
                held.copy_(value)
            case _:
                state[field] = value.item()


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
