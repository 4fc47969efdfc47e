"""Reading an adapter folder, strictly: what can't be applied whole is an error that names the culprit."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from peftkit.artifact.adapters_library import is_adapters_library, read_adapters_library
from peftkit.artifact.files import CONFIG_FILE, RECORD_FILE, TENSOR_FILE, present, read_json, read_tensors
from peftkit.artifact.identity import uid_of
from peftkit.artifact.peft_format import from_peft
from peftkit.base import BaseInfo, module_shapes
from peftkit.errors import AdapterError, BaseMismatchError, InputError
from peftkit.methods import AnyConfig, BottleneckConfig, LoraConfig, PrefixTuningConfig, PTuningV2Config
from peftkit.methods.bottleneck import PREFIX as BOTTLENECK_PREFIX
from peftkit.methods.lora import PREFIX, expected_tensors
from peftkit.methods.method import check_tensors
from peftkit.methods.prefix import kv_width
from peftkit.methods.soft_prompt import KEY as PROMPT_KEY

logger = logging.getLogger(__name__)

_LAYER_KEY = re.compile(re.escape(BOTTLENECK_PREFIX) + r"\d+\.")


@dataclass(frozen=True)
class Artifact:
    """An adapter as it lies on disk."""

    path: Path
    config: AnyConfig
    tensors: dict[str, Tensor]
    """PEFT key → CPU tensor."""
    uid: str
    """SHA-256 over what the adapter computes."""
    record: dict[str, Any]
    """What `peftkit.json` says of its making; empty for a folder that another program wrote."""


def read_adapter(
    path: str | Path,
    *,
    base: BaseInfo | None = None,
    config: PretrainedConfig | None = None,
    strict_base: bool = False,
) -> Artifact:
    """Reads and checks an adapter folder: HF PEFT's, or one that the `adapters` library saved.

    With `base` the adapter must fit it: another architecture, tokenizer or shape is BaseMismatchError; other weights or
    settings of the same shape are a warning, or an error with `strict_base`. `config` alone checks shapes only. Without
    either, what is checked is that the folder is whole and its tensors agree with its own config.
    Raises AdapterError or its children; nothing is unpickled.
    """
    folder = Path(path)
    fields = read_json(present(folder, CONFIG_FILE))
    record = read_json(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else {}
    if base is not None:
        config = AutoConfig.from_pretrained(base.path)
    if is_adapters_library(fields):
        method, tensors = read_adapters_library(folder)
        _check_family(folder, fields, config)
    else:
        method = from_peft(fields, str(folder / CONFIG_FILE))
        read = read_tensors(folder, TENSOR_FILE, "adapter_model.bin")
        tensors = {name: tensor for name, tensor in read.items() if not _is_frozen_copy(name)}
    if base is not None:
        _check_base(folder, record, base, strict_base)
    _check_shapes(folder, method, tensors, config)
    if isinstance(method, BottleneckConfig):
        method = method.resolved(_own_bottleneck(tensors)[1])
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{folder / TENSOR_FILE}: {name} has values that aren't finite")
    uid = uid_of(method, tensors)
    if record.get("uid", uid) != uid:
        raise AdapterError(
            f"{folder}: its content isn't what {RECORD_FILE} was written for (uid differs): save it again"
        )
    return Artifact(path=folder, config=method, tensors=tensors, uid=uid, record=record)


def _check_family(folder: Path, fields: Mapping[str, Any], config: PretrainedConfig | None) -> None:
    if config is not None and config.model_type != fields["model_type"]:
        raise BaseMismatchError(f"{folder} was made for a {fields['model_type']} base, not for {config.model_type}")


def base_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says of the base: `id` and `fingerprint`, where it says so."""
    return record.get("base") or {}


def _is_frozen_copy(name: str) -> bool:
    """HF PEFT stores the frozen matrix of a targeted embedding or output layer beside its update."""
    return ".base_layer." in name


def _check_shapes(
    folder: Path, method: AnyConfig, tensors: Mapping[str, Tensor], config: PretrainedConfig | None
) -> None:
    where = str(folder / TENSOR_FILE)
    if isinstance(method, LoraConfig):
        shapes = module_shapes(config) if config is not None else _own_shapes(tensors, where)
        try:
            sites = method.resolve(shapes)
        except InputError as error:
            raise AdapterError(f"{folder / CONFIG_FILE}: {error}", field=error.field) from error
        check_tensors(tensors, expected_tensors(method, sites), where)
        return
    if isinstance(method, BottleneckConfig):
        layers, hidden = _shape_of_base(config) if config is not None else _own_bottleneck(tensors)
        try:
            expected = method.expected_tensors(layers, hidden)
        except InputError as error:
            raise AdapterError(f"{folder / CONFIG_FILE}: {error}", field=error.field) from error
        check_tensors(tensors, expected, where)
        return
    width = int(tensors[PROMPT_KEY].shape[-1]) if PROMPT_KEY in tensors else 0
    if config is not None:
        layers, width = _shape_of_base(config)
        if isinstance(method, PrefixTuningConfig | PTuningV2Config):
            width = layers * 2 * kv_width(config)
    check_tensors(tensors, {PROMPT_KEY: (method.num_virtual_tokens, width)}, where)


def _shape_of_base(config: PretrainedConfig) -> tuple[int, int]:
    return int(config.num_hidden_layers), int(config.hidden_size)


def _own_bottleneck(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Layers and hidden size that a bottleneck adapter's own tensors speak of."""
    layers = [int(name.removeprefix(BOTTLENECK_PREFIX).split(".")[0]) for name in tensors if _LAYER_KEY.match(name)]
    hidden = next((tensor.shape[1] for name, tensor in tensors.items() if name.endswith("down.weight")), 0)
    return max(layers, default=-1) + 1, hidden


def _own_shapes(tensors: Mapping[str, Tensor], where: str) -> dict[str, tuple[int, int]]:
    """(out, in) of the layers that a LoRA's own tensors speak of."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".lora_magnitude_vector"):
            continue
        path, _, side = name.removesuffix(".weight").rpartition(".lora_")
        if not path.startswith(PREFIX) or side not in ("A", "B") or tensor.dim() != 2:
            raise AdapterError(f"{where}: {name} isn't a LoRA tensor of a linear layer")
        sides.setdefault(path.removeprefix(PREFIX), {})[side] = tensor
    for path, pair in sides.items():
        if set(pair) != {"A", "B"}:
            raise AdapterError(f"{where}: {path} has only lora_{next(iter(pair))}")
    return {path: (pair["B"].shape[0], pair["A"].shape[1]) for path, pair in sides.items()}


def _check_base(folder: Path, record: Mapping[str, Any], base: BaseInfo, strict_base: bool) -> None:
    recorded = base_of(record)
    made_for: dict[str, Any] = recorded.get("fingerprint") or {}
    if not made_for:
        logger.info("%s doesn't say which base it was made for: only its shapes are checked", folder)
        return
    here = base.fingerprint
    name = recorded.get("id")
    for part in ("architecture", "tokenizer"):
        if made_for.get(part) != getattr(here, part):
            raise BaseMismatchError(
                f"{folder} was made for {name}, whose {part} is not that of {base.name}: serve it on its own base"
            )
    if any(made_for.get(part) != getattr(here, part) for part in ("weights", "config")):
        message = f"{folder} was made for {name} with other weights or settings than those of {base.name}"
        if strict_base:
            raise BaseMismatchError(message)
        logger.warning("%s: its answers may differ from those seen in training", message)
