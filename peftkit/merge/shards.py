"""Writing safetensors a tensor at a time, and an HF folder of several such files."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_ENTRY_BYTES = 160
"""Room in the header for one tensor beside its name: type, shape and two offsets."""
_ALIGNMENT = 8


class ShardWriter:
    """One safetensors file. Its header comes first and is filled in last, in room that was left for it.

    Tensors whose size would leave the next one unaligned are kept back until the end.
    """

    def __init__(self, path: Path, max_tensors: int, max_name: int = 128) -> None:
        """`path` will hold at most `max_tensors` tensors with names of at most `max_name` characters."""
        room = 64 + max_tensors * (_ENTRY_BYTES + max_name)
        self._room = -(-room // _ALIGNMENT) * _ALIGNMENT
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._kept_back: list[tuple[str, Tensor]] = []
        self._end = 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(b"\0" * (8 + self._room))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors so far."""
        return self._end

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes a float or uint8 tensor."""
        if tensor.numel() * tensor.element_size() % _ALIGNMENT:
            self._kept_back.append((name, tensor))
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """Writes what was kept back and the header."""
        for name, tensor in sorted(self._kept_back, key=lambda entry: -entry[1].element_size()):
            self._write(name, tensor)
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        assert len(header) <= self._room, "the header has the room that was left for it"
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.close()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _write(self, name: str, tensor: Tensor) -> None:
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(content.data)
        start, self._end = self._end, self._end + content.nbytes
        self._entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self._end],
        }


def write_index(folder: Path, files: dict[str, str], num_bytes: int) -> None:
    """Writes the index of a folder with several files; `files` is name of a tensor → name of its file."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
