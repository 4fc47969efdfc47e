"""A base with an adapter → a plain transformers model."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from peftkit.artifact import Artifact, read_adapter
from peftkit.base import auto_dtype
from peftkit.errors import UnsupportedError
from peftkit.merge.compose import Method, Weight, compose
from peftkit.merge.delta import Change, lora_changes, merged_weight
from peftkit.methods import BottleneckConfig, LoraConfig, attached
from peftkit.methods.lora import EMBEDDING, HEAD, is_tied
from peftkit.methods.method import base_shapes

_WRAPPED = ".base_layer."
_EMBEDDING, _HEAD = f"{EMBEDDING}.weight", f"{HEAD}.weight"


def merge(
    model: PreTrainedModel,
    adapters: Sequence[str | Path],
    *,
    dtype: str | torch.dtype = "auto",
    weights: Sequence[Weight] | None = None,
    method: Method = "exact",
) -> PreTrainedModel:
    """Merges adapter folders into a copy of `model` and returns the copy: a plain transformers model in eval mode.

    Several adapters are composed first, by `method` and with `weights` (1 unless given), as `compose` does.

    `model` is a base from `load_base`; it is left as it is, and adapters attached to it take no part. An NF4 base comes
    out dequantised. `dtype` is that of the result; "auto" is that of the weights which aren't quantised.
    Raises InputError when no adapter is given, AdapterError or its children when it doesn't fit the base,
    UnsupportedError for a method that can't be put into weights.
    """
    if isinstance(adapters, str | Path):
        adapters = [adapters]
    base = getattr(model, "peftkit_base", None)
    artifacts = [read_adapter(adapter, base=base, config=model.config) for adapter in adapters]
    for artifact in artifacts:
        mergeable(artifact)
    return merge_artifact(model, compose(artifacts, weights, method=method).artifact, dtype)


def merge_artifact(model: PreTrainedModel, artifact: Artifact, dtype: str | torch.dtype) -> PreTrainedModel:
    """`merge` for an adapter that was read and checked against this base already."""
    target = model.dtype if dtype == "auto" else auto_dtype(dtype, model.device)
    changes, tied = changes_of(artifact, model), is_tied(model.config)
    parameters = _base_parameters(model)
    if tied:
        parameters[_HEAD] = parameters[_EMBEDDING]
    assert set(changes) <= set(parameters), "every change has its weight"
    with torch.no_grad():
        tensors = {
            name: merged_weight(name, parameter, changes.get(name), target) for name, parameter in parameters.items()
        }
    tied = tied and torch.equal(tensors[_HEAD], tensors[_EMBEDDING])
    if tied:
        del tensors[_HEAD]
    return _plain(model, tensors, target, tied=tied)


def changes_of(artifact: Artifact, model: PreTrainedModel) -> dict[str, Change]:
    """Name of each parameter of its base that an adapter changes → how."""
    return lora_changes(mergeable(artifact), artifact.tensors, base_shapes(model), tied=is_tied(model.config))


def mergeable(artifact: Artifact) -> LoraConfig:
    """The config of an adapter that can be merged. Raises UnsupportedError that says what to do with another."""
    for part in artifact.parts:
        if not isinstance(part.config, LoraConfig):
            is_bottleneck = isinstance(part.config, BottleneckConfig)
            reason = "its layers are not linear" if is_bottleneck else "its virtual tokens stand before the text"
            raise UnsupportedError(
                f"{artifact.path}: a {part.config.kind} adapter can't be merged into weights, for {reason}; serve it "
                f"unmerged: peftkit serve --base BASE --adapter NAME={artifact.path}"
            )
    config = artifact.config
    assert isinstance(config, LoraConfig)
    return config


def _base_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The frozen base's own parameters by the names they have without adapters; a tied weight once."""
    adapters = {id(parameter) for method in attached(model) for parameter in method.parameters().values()}
    return {
        name.replace(_WRAPPED, "."): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in adapters
    }


def _plain(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype, *, tied: bool
) -> PreTrainedModel:
    """A model of the same class and settings over `tensors`, without quantisation."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = tied
    config.__dict__.pop("quantization_config", None)
    device_map = {"": model.device}
    plain = type(model).from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, device_map=device_map)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.eval()
