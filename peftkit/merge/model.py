"""A base with an adapter → a plain transformers model."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from peftkit.artifact import Artifact, read_adapter
from peftkit.base import auto_dtype
from peftkit.errors import InputError, UnsupportedError
from peftkit.merge.delta import lora_updates, merged_weight
from peftkit.methods import BottleneckConfig, LoraConfig, attached
from peftkit.methods.method import linear_shapes

_WRAPPED = ".base_layer."


def merge(
    model: PreTrainedModel, adapters: Sequence[str | Path], *, dtype: str | torch.dtype = "auto"
) -> PreTrainedModel:
    """Merges an adapter folder into a copy of `model` and returns the copy: a plain transformers model in eval mode.

    `model` is a base from `load_base`; it is left as it is, and adapters attached to it take no part. An NF4 base comes
    out dequantised. `dtype` is that of the result; "auto" is that of the weights which aren't quantised.
    Raises InputError unless there is exactly one adapter, AdapterError or its children when it doesn't fit the base,
    UnsupportedError for a method that can't be put into weights.
    """
    if isinstance(adapters, str | Path):
        adapters = [adapters]
    if len(adapters) != 1:
        raise InputError(f"{len(adapters)} adapters are given: one is merged at a time", field="adapters")
    artifact = read_adapter(adapters[0], base=getattr(model, "peftkit_base", None), config=model.config)
    return merge_artifact(model, artifact, dtype)


def merge_artifact(model: PreTrainedModel, artifact: Artifact, dtype: str | torch.dtype) -> PreTrainedModel:
    """`merge` for an adapter that was read and checked against this base already."""
    target = model.dtype if dtype == "auto" else auto_dtype(dtype, model.device)
    updates = lora_updates(mergeable(artifact), artifact.tensors, linear_shapes(model))
    tensors = {}
    num_merged = 0
    with torch.no_grad():
        for name, parameter in _base_parameters(model).items():
            update = updates.get(name.removesuffix(".weight"))
            num_merged += update is not None
            tensors[name] = merged_weight(name, parameter, update, target)
    assert num_merged == len(updates), "every update has its weight"
    return _plain(model, tensors, target)


def mergeable(artifact: Artifact) -> LoraConfig:
    """The config of an adapter that can be merged. Raises UnsupportedError that says what to do with another."""
    if isinstance(artifact.config, LoraConfig):
        return artifact.config
    is_bottleneck = isinstance(artifact.config, BottleneckConfig)
    reason = "its layers are not linear" if is_bottleneck else "its virtual tokens stand before the text"
    raise UnsupportedError(
        f"{artifact.path}: a {artifact.config.kind} adapter can't be merged into weights, for {reason}; serve it "
        f"unmerged: peftkit serve --base BASE --adapter NAME={artifact.path}"
    )


def _base_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The frozen base's own parameters by the names they have without adapters; a tied weight once."""
    adapters = {id(parameter) for method in attached(model) for parameter in method.parameters().values()}
    return {
        name.replace(_WRAPPED, "."): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in adapters
    }


def _plain(model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """A model of the same class and settings over `tensors`, without quantisation."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    device_map = {"": model.device}
    plain = type(model).from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, device_map=device_map)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.eval()
