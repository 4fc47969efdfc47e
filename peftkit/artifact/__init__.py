"""The adapter on disk: one HF PEFT folder with `peftkit.json` beside it, read strictly and known by its content."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from peftkit.artifact.adapters_library import read_adapters_library
from peftkit.artifact.identity import NAME, uid_of, uid_of_parts
from peftkit.artifact.reader import Artifact, Part, read_adapter
from peftkit.artifact.writer import write_adapter, write_adapters_library, write_files, write_parts
from peftkit.base import BaseInfo
from peftkit.errors import InputError
from peftkit.methods import (
    AnyConfig,
    PrefixTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    attach,
    attached,
    check_together,
)

__all__ = [
    "NAME",
    "Artifact",
    "Part",
    "base_record",
    "load_adapter",
    "put_on",
    "read_adapter",
    "read_adapters_library",
    "save_adapter",
    "uid_of",
    "uid_of_parts",
    "write_adapter",
    "write_adapters_library",
    "write_files",
    "write_parts",
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

    Two methods together become a folder with one for each of them. Raises InputError when the model has no adapter,
    RunError when there is no room.
    """
    methods = attached(model)
    if not methods:
        raise InputError("the model has no adapter attached: there is nothing to save")
    parts = [(method.exported_config, method.export()) for method in methods]
    return write_parts(path, parts, {**base_record(model), **record})


def load_adapter(
    model: PreTrainedModel, path: str | Path, *, trainable: bool = False, strict_base: bool = False
) -> PreTrainedModel:
    """Attaches the adapter of a folder to `model`, frozen unless `trainable`, and returns the model.

    Raises AdapterError or its children when the folder is damaged or doesn't fit; the model is then untouched.
    """
    info: BaseInfo | None = getattr(model, "peftkit_base", None)
    artifact = read_adapter(path, base=info, config=model.config, strict_base=strict_base)
    put_on(model, artifact, trainable=trainable)
    return model


def put_on(model: PreTrainedModel, artifact: Artifact, *, trainable: bool = False) -> None:
    """Attaches an adapter that was read and checked against this base already, frozen unless `trainable`.

    Raises InputError when the model has such a method attached already; it is then untouched.
    """
    check_together([method.kind for method in attached(model)] + [part.config.kind for part in artifact.parts])
    for part in artifact.parts:
        attach(model, _unstarted(part.config))
        method = attached(model)[-1]
        method.load(part.tensors)
        method.config = part.config
        for parameter in method.parameters().values():
            parameter.requires_grad_(trainable)


def _unstarted(config: AnyConfig) -> AnyConfig:
    """The same function, without the work of a start and the network behind it, which exported tensors replace."""
    match config:
        case PrefixTuningConfig():
            return config.model_copy(update={"init": "zero", "encoder_hidden_size": 1})
        case PTuningV2Config():
            return config.model_copy(update={"init": "zero"})
        case PTuningConfig():
            return config.model_copy(update={"encoder": "mlp", "encoder_hidden_size": 1})
        case _:
            return config
