"""Whether a run fits into memory, found before it begins, and the smallest change with which it would."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from peftkit.errors import InputError
from peftkit.train.adapter_size import BYTES_PER_PARAMETER
from peftkit.train.loss import chunk_rows
from peftkit.train.memory import (
    MemoryEstimate,
    available_memory,
    estimate_memory,
    held_memory,
    num_trainable,
    weight_bytes,
)
from peftkit.train.prepare import Prepared, checkpoint_activations

_NF4_SHARE = 0.52
"""Bytes of a weight in NF4, its share of the scales included."""


def estimate(prepared: Prepared) -> MemoryEstimate:
    """What a run needs as its recipe has it."""
    return estimate_memory(
        prepared.model,
        prepared.sampler().shapes(),
        packed=prepared.packed,
        moments_8bit=prepared.recipe.optim.name.endswith("8bit"),
    )


def check_fits(prepared: Prepared) -> None:
    """Raises InputError for a run that needs more than there is; one that is far from it isn't rehearsed."""
    available = available_memory(prepared.model.device)
    if 2 * _at_most(prepared) > available - held_memory(prepared.model.device):
        reason = why_not(prepared, estimate(prepared), available)
        if reason is not None:
            raise InputError(reason, field="train")


def why_not(prepared: Prepared, memory: MemoryEstimate, available: int) -> str | None:
    """That a run won't fit, and with what it would; None where it fits."""
    if memory.total <= available:
        return None
    head = f"will not fit: {memory.total / 1e9:.1f} GB are needed and {available / 1e9:.1f} GB are there"
    wanted = prepared.recipe.train.gradient_checkpointing
    tried: list[tuple[str, int]] = []
    try:
        for changed in _smaller(prepared):
            checkpoint_activations(changed.model, changed.recipe.train.gradient_checkpointing)
            tried.append((_difference(prepared, changed), estimate(changed).total))
            if tried[-1][1] <= available:
                return f"{head}; it would with {tried[-1][0]}"
    finally:
        checkpoint_activations(prepared.model, wanted)
    for difference, needed in tried:  # NF4 changes what is trained on, so it comes last
        if needed - _saved_by_nf4(prepared) <= available:
            return f"{head}; it would with {' '.join(filter(None, (difference, 'quant.kind=nf4')))}"
    return f"{head}: use a smaller base, a shorter data.max_length or a device with more memory"


def _smaller(prepared: Prepared) -> Iterator[Prepared]:
    """The run with smaller micro-batches, more of them in a step, and with checkpointing: the nearest first."""
    train = prepared.recipe.train
    whole = train.batch_tokens if train.batch_size is None else train.batch_size
    name = "batch_tokens" if train.batch_size is None else "batch_size"
    least = prepared.recipe.data.max_length if train.batch_size is None else 1
    factor = 1
    while factor == 1 or whole // factor >= least:
        settings = {name: whole // factor, "grad_accum": train.grad_accum * factor}
        for checkpointing in sorted({train.gradient_checkpointing, True}):
            changed = train.model_copy(update={**settings, "gradient_checkpointing": checkpointing})
            yield replace(prepared, recipe=prepared.recipe.model_copy(update={"train": changed}))
        factor *= 2


def _difference(prepared: Prepared, changed: Prepared) -> str:
    before, after = prepared.recipe.train.model_dump(), changed.recipe.train.model_dump()
    return " ".join(f"train.{name}={_yaml(after[name])}" for name in before if before[name] != after[name])


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _saved_by_nf4(prepared: Prepared) -> int:
    """Bytes that NF4 takes off the weights of the layers."""
    if prepared.recipe.quant.kind == "nf4":
        return 0
    layers = [
        parameter
        for name, parameter in prepared.model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and not parameter.requires_grad
    ]
    return sum(int(parameter.numel() * (parameter.element_size() - _NF4_SHARE)) for parameter in layers)


def _at_most(prepared: Prepared) -> int:
    """More than a run can need, from shapes alone: three times a layer's values for each position, and scores."""
    config, model = prepared.model.config, prepared.model
    shapes = prepared.sampler().shapes()
    positions = max(shape.rows * shape.length for shape in shapes)
    scores = max(shape.rows * shape.length**2 for shape in shapes) * config.num_attention_heads * 4
    layer = 12 * (config.hidden_size + config.intermediate_size) * 4 * positions + scores
    logits = chunk_rows(config.vocab_size) * config.vocab_size * 20
    trained = BYTES_PER_PARAMETER * num_trainable(model)
    return weight_bytes(model) + trained + config.num_hidden_layers * layer + logits
