"""Reading an adapter folder, strictly: what can't be applied whole is an error that names the culprit."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from peftkit.artifact.adapters_library import is_adapters_library, read_adapters_library
from peftkit.artifact.files import CONFIG_FILE, RECORD_FILE, TENSOR_FILE, present, read_json, read_tensors
from peftkit.artifact.identity import uid_of_parts
from peftkit.artifact.lora_shapes import own_shapes
from peftkit.artifact.peft_format import from_peft
from peftkit.base import BaseInfo, Quant, parameter_shapes
from peftkit.errors import AdapterError, BaseMismatchError, InputError, UnsupportedError
from peftkit.methods import (
    KINDS,
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PTuningV2Config,
    check_together,
)
from peftkit.methods.bottleneck import PREFIX as BOTTLENECK_PREFIX
from peftkit.methods.lora import HEAD, PREFIX, is_tied
from peftkit.methods.method import check_tensors
from peftkit.methods.prefix import kv_width
from peftkit.methods.soft_prompt import KEY as PROMPT_KEY

logger = logging.getLogger(__name__)

_HEAD_ROWS = f"{PREFIX}{HEAD}.token_adapter."
_LAYER_KEY = re.compile(re.escape(BOTTLENECK_PREFIX) + r"[0-9]{1,4}\.")


@dataclass(frozen=True, slots=True)
class Part:
    """What one method of an adapter computes."""

    config: AnyConfig
    tensors: dict[str, Tensor]
    """PEFT key → CPU tensor."""


@dataclass(frozen=True)
class Artifact:
    """An adapter as it lies on disk."""

    path: Path
    parts: tuple[Part, ...]
    """One, or two methods together."""
    uid: str
    """SHA-256 over what the adapter computes."""
    record: dict[str, Any]
    """What `peftkit.json` says of its making; empty for a folder that another program wrote."""

    @property
    def kind(self) -> str:
        """Name of its method, or of both with a plus between them."""
        return "+".join(part.config.kind for part in self.parts)

    @property
    def config(self) -> AnyConfig:
        """That of the only method. Raises UnsupportedError where there are two."""
        return self._only().config

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of the only method. Raises UnsupportedError where there are two."""
        return self._only().tensors

    @property
    def num_virtual(self) -> int:
        """Virtual tokens at the head of each text."""
        return sum(getattr(part.config, "num_virtual_tokens", 0) for part in self.parts)

    def _only(self) -> Part:
        first_part, *others = self.parts
        if others:
            first = first_part.config.kind
            raise UnsupportedError(
                f"{self.path} is two methods together ({self.kind}), where one is wanted: take the folder of one of "
                f"them, such as {self.path / first}"
            )
        return first_part


def read_adapter(
    path: str | Path,
    *,
    base: BaseInfo | None = None,
    config: PretrainedConfig | None = None,
    strict_base: bool = False,
) -> Artifact:
    """Reads and checks an adapter folder: HF PEFT's, one that the `adapters` library saved, or two methods together.

    With `base` the adapter must fit it: another architecture, tokenizer or shape is BaseMismatchError; other weights or
    settings of the same shape are a warning, or an error with `strict_base`. `config` alone checks shapes only. Without
    either, what is checked is that the folder is whole and its tensors agree with its own config.
    Raises AdapterError or its children; nothing is unpickled.
    """
    folder = Path(path)
    record = read_json(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else {}
    _check_record(folder, record)
    if base is not None:
        config = AutoConfig.from_pretrained(base.path)
    kinds = record.get("parts")
    parts = tuple(_read_part(folder / kind if kinds else folder, config) for kind in kinds or [""])
    if kinds and [part.config.kind for part in parts] != kinds:
        raise AdapterError(f"{folder / RECORD_FILE}: parts is {kinds}, the folders hold something else", field="parts")
    uid = uid_of_parts([(part.config, part.tensors) for part in parts])
    if record.get("uid", uid) != uid:
        raise AdapterError(
            f"{folder}: its content isn't what {RECORD_FILE} was written for (uid differs): save it again"
        )
    if base is not None:
        _check_base(folder, record, base, strict_base)
    return Artifact(folder, parts, uid, record)


def _check_record(folder: Path, record: Mapping[str, Any]) -> None:
    """What is read from a record has the shape that it is read by."""
    where = folder / RECORD_FILE
    for field in ("base", "base.fingerprint", "chat_template", "recipe", "recipe.quant"):
        outer, _, inner = field.rpartition(".")
        if not isinstance(((record.get(outer) or {}) if outer else record).get(inner), Mapping | None):
            raise AdapterError(f"{where}: {field} must be an object", field=field)
    if not isinstance(base_of(record).get("id"), str | None):
        raise AdapterError(f"{where}: base.id must be the base's name", field="base.id")
    if (template := record.get("chat_template")) and not isinstance(template.get("text"), str):
        raise AdapterError(f"{where}: chat_template.text must be the template", field="chat_template.text")
    if record.get("quant", "none") not in get_args(Quant):
        raise AdapterError(f"{where}: quant must be one of {', '.join(get_args(Quant))}", field="quant")
    parts = record.get("parts")
    if parts is None:
        return
    if not isinstance(parts, list) or not parts or any(kind not in KINDS for kind in parts):
        raise AdapterError(f"{where}: parts must be a list of methods: {', '.join(KINDS)}", field="parts")
    try:
        check_together(parts)
    except InputError as error:
        raise AdapterError(f"{where}: parts: {error}", field="parts") from error


def _read_part(folder: Path, config: PretrainedConfig | None) -> Part:
    fields = read_json(present(folder, CONFIG_FILE))
    if is_adapters_library(fields):
        method, tensors = read_adapters_library(folder)
        _check_family(folder, fields, config)
    else:
        method = from_peft(fields, str(folder / CONFIG_FILE))
        read = read_tensors(folder, TENSOR_FILE, "adapter_model.bin")
        tensors = {name: tensor for name, tensor in read.items() if not _is_frozen_copy(name)}
    _check_shapes(folder, method, tensors, config)
    if isinstance(method, BottleneckConfig):
        method = method.resolved(_own_bottleneck(tensors)[1])
    for name, tensor in tensors.items():
        # a sum is finite only where all is, and several times quicker to have
        if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor.double()).all():
            raise AdapterError(f"{folder / TENSOR_FILE}: {name} has values that aren't finite")
    return Part(method, tensors)


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
        shapes = parameter_shapes(config) if config is not None else own_shapes(tensors, method, where)
        tied = is_tied(config) if config is not None else not any(name.startswith(_HEAD_ROWS) for name in tensors)
        try:
            expected = method.expected_tensors(shapes, tied=tied, partial=config is None)
        except InputError as error:
            raise AdapterError(f"{folder / CONFIG_FILE}: {error}", field=error.field) from error
        check_tensors(tensors, expected, where)
        return
    if isinstance(method, BottleneckConfig):
        layers, hidden = _shape_of_base(config) if config is not None else _own_bottleneck(tensors)
        try:
            expected = method.expected_tensors(layers, hidden)
        except InputError as error:
            raise AdapterError(f"{folder / CONFIG_FILE}: {error}", field=error.field) from error
        check_tensors(tensors, expected, where)
        return
    width = next((tensor.shape[-1] for tensor in tensors.values() if tensor.dim()), 0)
    if config is not None:
        layers, width = _shape_of_base(config)
        if isinstance(method, PrefixTuningConfig | PTuningV2Config):
            width = layers * 2 * kv_width(config)
    check_tensors(tensors, {PROMPT_KEY: (method.num_virtual_tokens, width)}, where)


def _shape_of_base(config: PretrainedConfig) -> tuple[int, int]:
    return int(config.num_hidden_layers), int(config.hidden_size)


def _own_bottleneck(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Layers and hidden size that a bottleneck adapter's own tensors speak of.

    A number that is out of all proportion isn't taken for a layer's: its tensor then matches nothing.
    """
    layers = [int(name.removeprefix(BOTTLENECK_PREFIX).split(".")[0]) for name in tensors if _LAYER_KEY.match(name)]
    downs = (tensor for name, tensor in tensors.items() if name.endswith("down.weight"))
    hidden = next((tensor.shape[1] for tensor in downs if tensor.dim() == 2), 0)
    return max(layers, default=-1) + 1, hidden


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
