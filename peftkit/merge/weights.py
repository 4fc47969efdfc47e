"""A base's weights one at a time, so that merging never holds a whole model."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from peftkit.artifact import Artifact
from peftkit.base import BaseInfo, auto_device, auto_dtype, check_nf4, parameter_shapes
from peftkit.base.folder import StoredTensor, stored_tensors
from peftkit.errors import BaseModelError
from peftkit.methods.lora import EMBEDDING, HEAD, is_tied

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

logger = logging.getLogger(__name__)

Mode = Literal["dequantized", "original", "requantize"]
"""What the update is added to: the weights after NF4 and back (to be kept so, or held in NF4 again), or as stored."""

EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Nf4:
    """How bitsandbytes holds a weight in four bits."""

    double_quant: bool
    dtype: torch.dtype
    """Type that a weight is cast to before it is quantised, and that it comes back in."""
    device: torch.device

    def quantized(self, weight: Tensor) -> "tuple[Tensor, QuantState]":
        """The codes and bitsandbytes' state of a weight (out, in)."""
        from bitsandbytes.functional import quantize_4bit

        weight = weight.to(self.device, self.dtype).contiguous()
        codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=self.double_quant, quant_type="nf4")
        assert state is not None
        return codes, state

    def round_trip(self, weight: Tensor) -> Tensor:
        """A weight as a layer that holds it so multiplies by it."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(*self.quantized(weight))


def nf4_of(artifact: Artifact) -> Nf4:
    """How the base of an adapter was held in training, by its record; else the usual way."""
    quant = artifact.record.get("recipe", {}).get("quant", {})
    device = auto_device("auto")
    dtype = auto_dtype(quant.get("compute_dtype", "auto"), device)
    return Nf4(quant.get("double_quant", True), dtype, device)


class BaseWeights:
    """The parameters of a base in the order of its files, each read from disk when it is asked for."""

    def __init__(self, info: BaseInfo, nf4: Nf4 | None) -> None:
        """With `nf4` the decoder's linear layers are taken through NF4 and back. Raises BaseModelError for a folder
        whose weights aren't those of its config, or a base that can't be held in NF4 here."""
        self.config: PretrainedConfig = AutoConfig.from_pretrained(info.path, local_files_only=True)
        self.tied = is_tied(self.config)
        self.shapes = parameter_shapes(self.config)
        self._nf4 = nf4
        if nf4 is not None:
            check_nf4(info, nf4.device)
        self._stored = self._checked(info.path)

    def names(self) -> Iterator[str]:
        """Names of the parameters, file by file; a tied weight once."""
        yield from sorted(self._stored, key=lambda name: (self._stored[name].file.name, self._stored[name].start))

    def file_of(self, name: str) -> str:
        """Name of the file that holds a parameter."""
        return self._stored[name].file.name

    def read(self, name: str) -> Tensor:
        """A fresh parameter as the mode multiplies by it. Raises BaseModelError for a file that ends too early."""
        weight = self.stored(name)
        if self._nf4 is None:
            return weight
        return self._nf4.round_trip(weight) if self.is_quantized(name) else weight.to(self._nf4.dtype)

    def stored(self, name: str) -> Tensor:
        """A fresh parameter as the folder holds it."""
        return _read(self._stored[name])

    def is_quantized(self, name: str) -> bool:
        """Whether NF4 holds this parameter: the weights of the decoder's linear layers."""
        return ".layers." in name and len(self.shapes[name]) == 2

    @property
    def largest_file_bytes(self) -> int:
        """Bytes of the largest file's parameters."""
        sizes: dict[str, int] = {}
        for tensor in self._stored.values():
            sizes[tensor.file.name] = sizes.get(tensor.file.name, 0) + tensor.num_bytes
        return max(sizes.values())

    def _checked(self, folder: Path) -> dict[str, StoredTensor]:
        wanted = {name: shape for name, shape in self.shapes.items() if not (self.tied and name == HEAD_WEIGHT)}
        stored = stored_tensors(folder)
        if missing := sorted(set(wanted) - set(stored)):
            raise BaseModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
        for name, shape in wanted.items():
            if stored[name].shape != shape:
                raise BaseModelError(
                    f"{folder}: tensor {name} has shape {list(stored[name].shape)} where config.json says {list(shape)}"
                )
        if extra := sorted(set(stored) - set(self.shapes)):
            logger.warning("%s: %d tensors belong to no layer, the first is %s", folder, len(extra), extra[0])
        return {name: stored[name] for name in wanted}


def _read(tensor: StoredTensor) -> Tensor:
    """The bytes of one tensor, read and not mapped: what was read is freed with it."""
    if tensor.dtype not in _DTYPES:
        raise BaseModelError(f"{tensor.file}: holds a tensor of type {tensor.dtype}, a base's weights are floats")
    content = bytearray(tensor.num_bytes)
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        if file.readinto(content) != tensor.num_bytes:
            raise BaseModelError(f"{tensor.file}: ended while it was read; is another program writing it?")
    return torch.frombuffer(content, dtype=_DTYPES[tensor.dtype]).view(tensor.shape)
