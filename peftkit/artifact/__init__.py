"""The adapter on disk: one HF PEFT folder with `peftkit.json` beside it, read strictly and known by its content."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from peftkit.artifact.adapters_library import read_adapters_library
from peftkit.artifact.identity import uid_of
from peftkit.artifact.reader import Artifact, read_adapter
from peftkit.artifact.writer import write_adapter, write_adapters_library, write_files
from peftkit.base import BaseInfo
from peftkit.errors import InputError
from peftkit.methods import attach, attached

__all__ = [
    "Artifact",
    "base_record",
    "load_adapter",
    "read_adapter",
    "read_adapters_library",
    "save_adapter",
    "uid_of",
    "write_adapter",
    "write_adapters_library",
    "write_files",
]


def base_record(model: PreTrainedModel) -> dict[str, Any]:
    """What an adapter's record says of the base it was made on."""
    info: BaseInfo | None = getattr(model, "peftkit_base", None)
    config = model.config
    base: dict[str, Any] = {
        "id": (config.name_or_path or None) if info is None else info.name,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "hidden_size": config.hidden_size,
    }
    if info is not None:
        base["fingerprint"] = asdict(info.fingerprint)
    return {"base": base, "quant": getattr(model, "peftkit_quant", "none")}


def save_adapter(model: PreTrainedModel, path: str | Path, **record: Any) -> Artifact:
    """Writes the adapter attached to `model` as an HF PEFT folder; `record` goes into its `peftkit.json`.

    Raises InputError when the model has no adapter or more than one, RunError when there is no room.
    """
    methods = attached(model)
    if len(methods) != 1:
        raise InputError(f"the model has {len(methods)} adapters attached: one is saved at a time")
    return write_adapter(path, methods[0].config, methods[0].export(), {**base_record(model), **record})


def load_adapter(
    model: PreTrainedModel, path: str | Path, *, trainable: bool = False, strict_base: bool = False
) -> PreTrainedModel:
    """Attaches the adapter of a folder to `model`, frozen unless `trainable`, and returns the model.

    Raises AdapterError or its children when the folder is damaged or doesn't fit; the model is then untouched.
    """
    info: BaseInfo | None = getattr(model, "peftkit_base", None)
    artifact = read_adapter(path, base=info, config=model.config, strict_base=strict_base)
    config = artifact.config
    before = {method.kind for method in attached(model)}
    attach(model, config)
    (method,) = [method for method in attached(model) if method.kind not in before]
    method.load(artifact.tensors)
    if not trainable:
        for parameter in method.parameters().values():
            parameter.requires_grad_(False)
    return model
