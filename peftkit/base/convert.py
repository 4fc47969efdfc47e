"""GGUF → a folder of the HF layout in fp32, made once, checked each time, and made again when damaged."""

import glob
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from filelock import FileLock
from gguf import GGUFReader
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from peftkit.base.cache import cache_dir, file_sha256
from peftkit.base.folder import ARCHITECTURES
from peftkit.errors import BaseModelError, RunError

logger = logging.getLogger(__name__)

PROVENANCE = "provenance.json"
_ROOM_MARGIN_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """A GGUF file to be converted."""

    path: Path
    sha256: str
    record: Mapping[str, Any]
    """What provenance.json says of it beside the hash."""
    texts: Mapping[str, str]
    """Files to write beside the weights: name → content (a licence)."""


def converted_dir(name: str, sha256: str) -> Path:
    """Where the conversion of a GGUF file with this hash lies, or will lie."""
    return cache_dir() / "bases" / f"{name}-{sha256[:12]}"


def is_whole(folder: Path) -> bool:
    """Whether a conversion is complete and its bytes are those that were written."""
    record = folder / PROVENANCE
    try:
        files = json.loads(record.read_text(encoding="utf-8"))["files"]
        return all(file_sha256(folder / name) == sha for name, sha in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def convert(source: Source, target: Path) -> Path:
    """Converts `source` into the folder `target` and returns it; a whole conversion is used as it is.

    Two processes that ask at once convert once. The folder appears whole or not at all. Raises `BaseModelError` when
    the disk has no room, or the file is damaged or of an architecture that isn't supported, `RunError` when writing
    fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f"{target.name}.lock")):
            if not is_whole(target):
                _replace(source, target)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{target}: can't be written ({error}); PEFTKIT_HOME names another folder") from error
    return target


def _replace(source: Source, target: Path) -> None:
    if target.exists():
        logger.info("%s is damaged and is made again", target)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):  # of a conversion that was killed
        shutil.rmtree(left)
    _check_room(target.parent, _needed_bytes(source.path))
    logger.info("converting %s once; it is kept in %s", source.path.name, target)
    temporary = Path(mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(source, temporary)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _needed_bytes(path: Path) -> int:
    """Size of a GGUF model in fp32, from its header; raises `BaseModelError` for a file that can't be converted."""
    try:
        reader = GGUFReader(path)
        texts = {key: str(field.contents()) for key, field in reader.fields.items() if key.startswith("general.")}
        needed = sum(int(tensor.n_elements) for tensor in reader.tensors) * 4
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BaseModelError(f"{path}: not a whole GGUF file ({error}); fetch it again") from None
    if (kind := texts.get("general.type", "model")) != "model":
        raise BaseModelError(f"{path}: its type is {kind}, a base has type model")
    if "split.count" in reader.fields:
        raise BaseModelError(f"{path}: is one part of a split model; join the parts with llama-gguf-split --merge")
    if (architecture := texts.get("general.architecture")) not in ARCHITECTURES:
        raise BaseModelError(
            f"{path}: architecture {architecture} isn't supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return needed


def _check_room(folder: Path, num_bytes: int) -> None:
    needed, free = num_bytes + _ROOM_MARGIN_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise BaseModelError(
            f"{folder}: converting the base to fp32 needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "PEFTKIT_HOME names another folder"
        )


def _write(source: Source, folder: Path) -> None:
    settings: dict[str, Any] = {"pretrained_model_name_or_path": source.path.parent, "gguf_file": source.path.name}
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**settings)
        if hasattr(transformers, "GgufConfig"):  # where it exists, a model read without it can't be saved
            settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, report = from_pretrained(**settings, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BaseModelError(f"{source.path}: can't be converted ({error})") from error
    if missing := sorted(report["missing_keys"]):
        raise BaseModelError(f"{source.path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    model.config.__dict__.pop("_model_name_or_path", None)
    model.config.architectures = [type(model).__name__]
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, text in source.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    folder.chmod(0o755)  # a cache may be shared: temporary folders and safetensors' files are private at first
    for file in folder.iterdir():
        file.chmod(0o644)
    record = {
        "source": {**source.record, "sha256": source.sha256},
        "dtype": "float32",
        "converted_with": {name: version(name) for name in ("peftkit", "transformers", "gguf", "torch")},
        "files": {file.name: file_sha256(file) for file in sorted(folder.iterdir())},
    }
    (folder / PROVENANCE).write_text(json.dumps(record, indent=1), encoding="utf-8")
