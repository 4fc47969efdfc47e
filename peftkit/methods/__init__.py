"""The methods: each file states its mathematics, its config and its module. `attach` puts one on a frozen model."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.errors import InputError
from peftkit.methods.bottleneck import BottleneckAdapter, BottleneckConfig
from peftkit.methods.fused import fast_share, fuse, holding, unfuse
from peftkit.methods.lora import Lora, LoraConfig, LoraSite
from peftkit.methods.method import Method, StartsFromText, attached
from peftkit.methods.prefix import Prefix, PrefixTuningConfig, PTuningV2Config
from peftkit.methods.prompt import PromptTuning, PromptTuningConfig
from peftkit.methods.ptuning import PTuning, PTuningConfig

__all__ = [
    "attach",
    "attached",
    "detach",
    "check_together",
    "fast_share",
    "fuse",
    "holding",
    "unfuse",
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
    "KINDS",
    "VIRTUAL_TOKENS",
]

AnyConfig = LoraConfig | BottleneckConfig | PrefixTuningConfig | PTuningV2Config | PTuningConfig | PromptTuningConfig
MethodConfig = Annotated[AnyConfig, Field(discriminator="kind")]
"""A method's settings as a recipe has them, told apart by `kind`."""

KINDS = ("lora", "bottleneck", "prefix", "ptuning_v2", "ptuning", "prompt")
VIRTUAL_TOKENS = frozenset(KINDS[2:])
"""Kinds that put virtual tokens before the text."""


def attach(
    model: PreTrainedModel, config: AnyConfig, *, tokenizer: PreTrainedTokenizerBase | None = None, seed: int = 0
) -> PreTrainedModel:
    """Puts an adapter on `model` in place and returns it; afterwards only adapter weights require grad.

    The starting weights depend on `config` and `seed` alone, whatever the device. `tokenizer` is needed for
    `init: text`. A method with virtual tokens can stand beside one without; each is frozen or trained by its own
    parameters' `requires_grad`, and what stood there before keeps its own. Raises InputError when the config doesn't
    fit the model or what is attached already.
    """
    trained = {id(one) for other in attached(model) for one in other.parameters().values() if one.requires_grad}
    method = _build(model, config, tokenizer, torch.Generator().manual_seed(seed))
    trained |= {id(parameter) for parameter in method.parameters().values()}
    setattr(model, "peftkit_methods", [*attached(model), method])  # noqa: B010 - models declare no such attribute
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return model


def _build(
    model: PreTrainedModel, config: AnyConfig, tokenizer: PreTrainedTokenizerBase | None, generator: torch.Generator
) -> Method:
    check_together([*(method.config.kind for method in attached(model)), config.kind])
    context = int(model.config.max_position_embeddings)
    if isinstance(config, StartsFromText) and config.num_virtual_tokens >= context:
        raise InputError(
            f"num_virtual_tokens: {config.num_virtual_tokens} leave no room for text in the base's {context} positions",
            field="num_virtual_tokens",
        )
    match config:
        case LoraConfig():
            return Lora(model, config, generator=generator)
        case BottleneckConfig():
            return BottleneckAdapter(model, config, generator=generator)
        case PTuningConfig():
            return PTuning(model, config, tokenizer=tokenizer, generator=generator)
        case PromptTuningConfig():
            return PromptTuning(model, config, tokenizer=tokenizer, generator=generator)
        case PrefixTuningConfig() | PTuningV2Config():
            return Prefix(model, config, tokenizer=tokenizer, generator=generator)


def check_together(kinds: Sequence[str]) -> None:
    """Raises InputError unless methods of these kinds can stand together: one of a kind, one with virtual tokens."""
    for place, kind in enumerate(kinds):
        for other in kinds[:place]:
            if other == kind or {other, kind} <= VIRTUAL_TOKENS:
                raise InputError(
                    f"a {other} adapter is there already, and a {kind} adapter can't stand beside it", field="kind"
                )


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Takes every adapter off `model`, which is then the bare frozen base again, its modules' own forwards too."""
    unfuse(model)
    for method in reversed(attached(model)):
        method.detach()
    setattr(model, "peftkit_methods", [])  # noqa: B010 - as in attach
    return model
