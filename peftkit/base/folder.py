"""A base on disk: a folder of the HF layout with config.json and safetensors. Read strictly, nothing is unpickled."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.errors import BaseModelError, did_you_mean

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""config.json's `model_type` → the architecture, for every family that is supported."""

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie."""

    file: Path
    dtype: str
    """As safetensors writes it: "F32", "BF16"."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    num_bytes: int


def check_folder(path: Path, *, nf4: bool = False) -> str:
    """Checks that `path` holds a base that can be used, without reading its weights. Returns the architecture.

    nf4: one whose weights bitsandbytes has quantised to NF4 will do. Raises `BaseModelError` that names the file and
    the fault: config.json missing or damaged, another architecture, weights missing, truncated, pickled or quantised
    already.
    """
    config = read_json(path / "config.json")
    architecture = _architecture(path, config)
    if (quantization := config.get("quantization_config")) and not (nf4 and holds_nf4(config)):
        raise BaseModelError(
            f"{path / 'config.json'}: the base is quantised already ({quantization.get('quant_method')}); "
            "name the full-precision base, peftkit quantises it itself with quant nf4"
        )
    stored_tensors(path)
    if not (path / "tokenizer.json").is_file() and not list(path.glob("tokenizer*.model")):
        raise BaseModelError(f"{path}: no tokenizer.json; save the base's tokenizer into this folder")
    return architecture


def holds_nf4(config: dict[str, Any]) -> bool:
    """Whether a config.json says that bitsandbytes has quantised the weights to NF4, their scales too."""
    found = config.get("quantization_config") or {}
    return (
        found.get("quant_method") == "bitsandbytes"
        and found.get("bnb_4bit_quant_type") == "nf4"
        and all(found.get(name) is True for name in ("load_in_4bit", "bnb_4bit_use_double_quant"))
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the base."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaseModelError(f"{path.parent}: no {path.name}, so it isn't a model folder") from None
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise BaseModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a base by name, from the headers of its safetensors files."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise BaseModelError(f"{file}: tensor {name} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    return tensors


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up a base's weights."""
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BaseModelError(f"{path / _INDEX}: has no weight_map")
        files = [path / name for name in sorted({str(name) for name in weight_map.values()})]
        for file in files:
            if file.parent != path or not file.is_file():
                raise BaseModelError(f"{path / _INDEX}: names {file.name}, which isn't in the folder; fetch it again")
        return files
    if pickled := [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]:
        raise BaseModelError(
            f"{pickled[0]}: pickled weights are refused, because reading them can run code; where you trust them, "
            'AutoModelForCausalLM.from_pretrained(folder).save_pretrained("new folder") writes safetensors'
        )
    raise BaseModelError(f"{path}: no model.safetensors, so it holds no weights")


def _architecture(path: Path, config: dict[str, Any]) -> str:
    model_type = str(config.get("model_type"))
    listed = config.get("architectures") or [ARCHITECTURES.get(model_type, model_type)]
    supported = list(ARCHITECTURES.values())
    if listed[0] not in supported or ARCHITECTURES.get(model_type) != listed[0]:
        raise BaseModelError(
            f"{path / 'config.json'}: architecture {listed[0]} (model_type {model_type}) isn't supported; "
            f"supported are {', '.join(supported)}{did_you_mean(str(listed[0]), supported)}"
        )
    return str(listed[0])


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + header_bytes > size:
            raise _damaged(file, f"it ends inside its header, at byte {size}")
        raw = stream.read(header_bytes)
    data_start = 8 + header_bytes
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = {
            name: StoredTensor(
                file, entry["dtype"], tuple(entry["shape"]), data_start + entry["data_offsets"][0], _length(entry)
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"its header can't be read ({type(error).__name__}: {error})") from None
    end = max((t.start + t.num_bytes for t in tensors.values()), default=data_start)
    if end > size:
        raise _damaged(file, f"it has {size} bytes of {end}")
    return tensors


def _length(entry: dict[str, Any]) -> int:
    start, end = entry["data_offsets"]
    wanted = math.prod(entry["shape"]) * _DTYPE_BYTES.get(entry["dtype"], 1)
    if start < 0 or end - start < wanted:
        raise ValueError(f"{end - start} bytes for a {entry['dtype']} tensor of shape {entry['shape']}")
    return end - start


def _damaged(file: Path, fault: str) -> BaseModelError:
    return BaseModelError(f"{file}: damaged, {fault}; fetch the file again")
