"""The methods: each file states its mathematics, its config and its module. `attach` puts one on a frozen model."""

from typing import Annotated, cast

import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.errors import InputError
from peftkit.methods.bottleneck import BottleneckAdapter, BottleneckConfig
from peftkit.methods.lora import Lora, LoraConfig, LoraSite
from peftkit.methods.method import Method
from peftkit.methods.prefix import Prefix, PrefixTuningConfig, PTuningV2Config
from peftkit.methods.prompt import PromptTuning, PromptTuningConfig
from peftkit.methods.ptuning import PTuning, PTuningConfig

__all__ = [
    "attach",
    "attached",
    "detach",
    "AnyConfig",
    "BottleneckAdapter",
    "BottleneckConfig",
    "Lora",
    "LoraConfig",
    "LoraSite",
    "Method",
    "MethodConfig",
    "Prefix",
    "PrefixTuningConfig",
    "PromptTuning",
    "PromptTuningConfig",
    "PTuning",
    "PTuningConfig",
    "PTuningV2Config",
]

AnyConfig = LoraConfig | BottleneckConfig | PrefixTuningConfig | PTuningV2Config | PTuningConfig | PromptTuningConfig
MethodConfig = Annotated[AnyConfig, Field(discriminator="kind")]
"""A method's settings as a recipe has them, told apart by `kind`."""


def attach(
    model: PreTrainedModel, config: AnyConfig, *, tokenizer: PreTrainedTokenizerBase | None = None, seed: int = 0
) -> PreTrainedModel:
    """Puts an adapter on `model` in place and returns it; afterwards only adapter weights require grad.

    The starting weights depend on `config` and `seed` alone, whatever the device. `tokenizer` is needed for
    `init: text`. A method with virtual tokens can stand beside one without. Raises InputError when the config doesn't
    fit the model or what is attached already.
    """
    method = _build(model, config, tokenizer, torch.Generator().manual_seed(seed))
    methods = [*attached(model), method]
    setattr(model, "peftkit_methods", methods)  # noqa: B010 - transformers' models declare no such attribute
    model.requires_grad_(False)
    for attached_method in methods:
        for parameter in attached_method.parameters().values():
            parameter.requires_grad_(True)
    return model


def _build(
    model: PreTrainedModel, config: AnyConfig, tokenizer: PreTrainedTokenizerBase | None, generator: torch.Generator
) -> Method:
    shifts = isinstance(config, PrefixTuningConfig | PTuningV2Config | PTuningConfig | PromptTuningConfig)
    for other in attached(model):
        if other.config.kind == config.kind or (shifts and other.shifts_positions):
            raise InputError(f"a {other.config.kind} adapter is attached already: detach it first", field="kind")
    match config:
        case LoraConfig():
            return Lora(model, config, generator=generator)
        case BottleneckConfig():
            return BottleneckAdapter(model, config, generator=generator)
        case PTuningConfig():
            return PTuning(model, config, generator=generator)
        case PromptTuningConfig():
            return PromptTuning(model, config, tokenizer=tokenizer, generator=generator)
        case PrefixTuningConfig() | PTuningV2Config():
            return Prefix(model, config, tokenizer=tokenizer, generator=generator)


def attached(model: PreTrainedModel) -> list[Method]:
    """The adapters on `model`, in the order in which they were attached."""
    return list(cast(list[Method], getattr(model, "peftkit_methods", [])))


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Takes every adapter off `model`, which is then the bare frozen base again."""
    for method in reversed(attached(model)):
        method.detach()
    setattr(model, "peftkit_methods", [])  # noqa: B010 - as in attach
    return model
