"""An adapter alone, as a folder for another program: HF PEFT, the `adapters` library, llama.cpp."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from transformers import AutoConfig

from peftkit.artifact import Artifact, read_adapter, write_adapters_library
from peftkit.artifact.files import CONFIG_FILE, TENSOR_FILE
from peftkit.base import BaseInfo, resolve_base
from peftkit.errors import RunError, UnsupportedError
from peftkit.merge.card import CARD_FILE, adapter_card
from peftkit.merge.folder import check_room, new_folder
from peftkit.merge.gguf import check_gguf_lora, write_lora
from peftkit.methods import BottleneckConfig

GGUF_LORA_FILE = "adapter-f32.gguf"


def export_peft(adapter: str | Path, out: str | Path, *, base_name: str | None = None) -> Artifact:
    """Writes an adapter as the plain HF PEFT folder `out` and returns it as read back.

    `base_name` is what the folder says its base is: a path or hub id that transformers opens; by default what the
    adapter's own folder says. Raises AdapterError for a folder that can't be read, UnsupportedError for a method that
    HF PEFT doesn't have, InputError when `out` is taken, RunError when it can't be written.
    """
    out = Path(out)
    artifact = read_adapter(adapter)
    if isinstance(artifact.config, BottleneckConfig):
        raise UnsupportedError(
            f"{adapter}: HF PEFT has no bottleneck adapters, so it could not read the export: use format adapters"
        )
    fields = _fields(artifact) | ({"base_model_name_or_path": base_name} if base_name else {})
    check_room(out, _num_bytes(artifact))
    called = fields.get("base_model_name_or_path")
    base_folder = Path(called) if called and Path(called).is_dir() else None
    with new_folder(out) as staging:
        safetensors.torch.save_file(artifact.tensors, staging / TENSOR_FILE, metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n", encoding="utf-8")
        (staging / CARD_FILE).write_text(adapter_card(artifact, called, base_folder), encoding="utf-8")
        if read_adapter(staging).uid != artifact.uid:
            raise RunError(f"{out} doesn't read back as {artifact.path}: is the disk sound?")
    return read_adapter(out)


def export_adapters(
    adapter: str | Path, out: str | Path, *, name: str = "adapter", base_name: str | None = None
) -> Artifact:
    """Writes bottleneck adapters as the new folder `out` for the `adapters` library and returns it as read back.

    `name` is what the library calls the adapter, `base_name` what the folder calls its base; by default as the adapter
    does. Raises AdapterError for a folder that can't be read or doesn't say enough of its base, UnsupportedError for
    another method, InputError when `out` is taken or for a name that the library can't use, RunError when it can't be
    written.
    """
    out = Path(out)
    artifact = read_adapter(adapter)
    check_room(out, _num_bytes(artifact))
    with new_folder(out) as staging:
        write_adapters_library(staging, artifact, name=name, base_name=base_name)
        if read_adapter(staging).uid != artifact.uid:
            raise RunError(f"{out} doesn't read back as {artifact.path}: is the disk sound?")
    return read_adapter(out)


def export_gguf(adapter: str | Path, out: str | Path, base: str | Path | BaseInfo) -> Artifact:
    """Writes a LoRA as the new folder `out` with a GGUF adapter for llama.cpp, and returns the adapter.

    Raises AdapterError or BaseModelError for a bad adapter or base, UnsupportedError for what a GGUF LoRA can't hold,
    InputError when `out` is taken, RunError when it can't be written.
    """
    out = Path(out)
    info = base if isinstance(base, BaseInfo) else resolve_base(base)
    artifact = read_adapter(adapter, base=info)
    config = check_gguf_lora(artifact.config, str(adapter))
    check_room(out, 2 * _num_bytes(artifact))
    with new_folder(out) as staging:
        base_config = AutoConfig.from_pretrained(info.path, local_files_only=True)
        write_lora(staging / GGUF_LORA_FILE, config, artifact.tensors, base_config)
        (staging / CARD_FILE).write_text(adapter_card(artifact, info.name, info.path), encoding="utf-8")
    return artifact


def named_base(artifact: Artifact) -> str | None:
    """The base that an adapter's folder names, as it was called where the adapter was made."""
    fields = _fields(artifact)
    return fields.get("base_model_name_or_path") or fields.get("model_name")


def transformers_name(base: str) -> str:
    """What transformers opens a base by: a hub id as it is, any other base by the folder it lies in on this machine.

    Raises BaseModelError for one that isn't here.
    """
    path = Path(base)
    is_hub_id = "/" in base and not path.is_absolute() and not path.exists()
    return base if is_hub_id else str(resolve_base(base).path)


def _fields(artifact: Artifact) -> dict[str, Any]:
    return json.loads((artifact.path / CONFIG_FILE).read_text(encoding="utf-8"))


def _num_bytes(artifact: Artifact) -> int:
    return sum(tensor.nbytes for part in artifact.parts for tensor in part.tensors.values())
