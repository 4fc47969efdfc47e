"""The size of an adapter that isn't there yet, so that one too large is refused before any of it is allocated."""

import math
from typing import Any

from transformers import PreTrainedModel

from peftkit.errors import InputError
from peftkit.methods import AnyConfig, BottleneckConfig, LoraConfig, PrefixTuningConfig, PTuningV2Config
from peftkit.methods.lora import is_tied
from peftkit.methods.method import base_shapes
from peftkit.methods.prefix import kv_width
from peftkit.train.memory import free_memory

BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments."""


def check_adapter_fits(model: PreTrainedModel, config: AnyConfig) -> None:
    """Raises InputError for an adapter that can't fit on the model's device, before any of it is allocated."""
    needed, free = BYTES_PER_PARAMETER * _num_parameters(model, config), free_memory(model.device)
    if needed <= free:
        return
    field = {"lora": "r", "bottleneck": "bottleneck_size"}.get(config.kind, "num_virtual_tokens")
    value = getattr(
        config.resolved(model.config.hidden_size) if isinstance(config, BottleneckConfig) else config, field
    )
    fitting = math.floor(value * free / needed / 2)  # half of what is free is for the step
    remedy = f"{field} {fitting} would leave room for a step" if fitting else "train less of the model"
    raise InputError(
        f"{field}: {value} makes an adapter of {needed / 1e9:.1f} GB with its gradients and moments, and "
        f"{free / 1e9:.1f} GB are free: {remedy}",
        field=field,
    )


def _num_parameters(model: PreTrainedModel, config: AnyConfig) -> int:
    """Parameters of an adapter that isn't there yet; of a reparameterising network the last layer, its largest."""
    settings: Any = model.config
    layers, hidden = int(settings.num_hidden_layers), int(settings.hidden_size)
    match config:
        case LoraConfig():
            shapes = config.expected_tensors(base_shapes(model), tied=is_tied(model.config))
            return sum(math.prod(shape) for shape in shapes.values())
        case BottleneckConfig():
            return sum(math.prod(shape) for shape in config.expected_tensors(layers, hidden).values())
        case PTuningV2Config():
            return config.num_virtual_tokens * layers * 2 * kv_width(settings)
        case PrefixTuningConfig():
            width = config.encoder_hidden_size or hidden
            return (config.num_virtual_tokens + width) * layers * 2 * kv_width(settings)
        case _:
            return config.num_virtual_tokens * hidden
