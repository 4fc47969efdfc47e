"""The files of an adapter folder, read strictly and never unpickled."""

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from peftkit.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
RECORD_FILE = "peftkit.json"

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def present(folder: Path, name: str) -> Path:
    """The path of a file that an adapter folder must have. Raises AdapterError when it isn't there."""
    if not folder.is_dir():
        raise AdapterError(f"there is no adapter folder {folder}")
    if not (folder / name).exists():
        raise AdapterError(f"{folder} isn't an adapter folder: it has no {name}")
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises AdapterError for anything else."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AdapterError(f"{path} must hold one JSON object")
    return content


def read_tensors(folder: Path, name: str, pickled: str) -> dict[str, Tensor]:
    """The floating-point tensors, of 16 to 64 bits, of the safetensors file `name`, on the CPU.

    Raises AdapterError when it is missing or damaged, or when only its counterpart `pickled` is there: the message has
    the command that converts it.
    """
    if not (folder / name).exists() and (folder / pickled).exists():
        raise AdapterError(
            f"{folder} holds a pickled {pickled}, which isn't loaded: convert it there with "
            f"python -c 'import torch, safetensors.torch as s; "
            f's.save_file({{k: v.clone() for k, v in torch.load("{pickled}", weights_only=True).items()}}, "{name}")\''
        )
    path = present(folder, name)
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{path} is damaged: {error}") from error
    if not tensors:
        raise AdapterError(f"{path} holds no tensors")
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS)
            raise AdapterError(f"{path}: {key} is {tensor.dtype}, where one of {known} is wanted")
    return tensors
