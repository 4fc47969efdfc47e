"""The methods: each file states its mathematics, its config and its module. `attach` puts one on a frozen model."""

from typing import Annotated, cast

import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.errors import InputError
from peftkit.methods.lora import Lora, LoraConfig, LoraSite
from peftkit.methods.method import Method
from peftkit.methods.prompt import PromptTuning, PromptTuningConfig

__all__ = [
    "attach",
    "attached",
    "detach",
    "Lora",
    "LoraConfig",
    "LoraSite",
    "Method",
    "MethodConfig",
    "PromptTuning",
    "PromptTuningConfig",
]

MethodConfig = Annotated[LoraConfig | PromptTuningConfig, Field(discriminator="kind")]


def attach(
    model: PreTrainedModel,
    config: LoraConfig | PromptTuningConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Puts an adapter on `model` in place and returns it; afterwards only adapter weights require grad.

    The starting weights depend on `config` and `seed` alone, whatever the device. `tokenizer` is needed for
    `init: text`. Raises InputError when the config doesn't fit the model or an adapter of its kind is attached already.
    """
    methods = attached(model)
    if any(method.kind == config.kind for method in methods):
        raise InputError(f"a {config.kind} adapter is attached already: detach it first", field="kind")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(config, LoraConfig):
        method: Method = Lora(model, config, generator=generator)
    else:
        method = PromptTuning(model, config, tokenizer=tokenizer, generator=generator)
    methods = [*methods, method]
    setattr(model, "peftkit_methods", methods)  # noqa: B010 - transformers' models declare no such attribute
    model.requires_grad_(False)
    for attached_method in methods:
        for parameter in attached_method.parameters().values():
            parameter.requires_grad_(True)
    return model


def attached(model: PreTrainedModel) -> list[Method]:
    """The adapters on `model`, in the order in which they were attached."""
    return list(cast(list[Method], getattr(model, "peftkit_methods", [])))


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Takes every adapter off `model`, which is then the bare frozen base again."""
    for method in reversed(attached(model)):
        method.detach()
    setattr(model, "peftkit_methods", [])  # noqa: B010 - as in attach
    return model
