"""Reading the weights of a frozen base."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from peftkit.base.folder import stored_tensors
from peftkit.errors import BaseModelError, InputError


def dequantized(weight: Tensor) -> Tensor:
    """A weight as its layer multiplies by it: NF4 dequantised exactly as bitsandbytes does, any other as it is.

    Raises InputError for NF4 weights that a forward pass has repacked for the CPU, which rounds their scales.
    """
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    if getattr(state, "packing_format_for_cpu", False):
        raise InputError("the 4-bit weights were repacked by a forward pass on this CPU: load the base afresh")
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)


def stored(folder: Path, name: str) -> Tensor:
    """A tensor of a base's folder as it is stored, on the CPU. Raises BaseModelError where there is none."""
    tensors = stored_tensors(folder)
    if name not in tensors:
        raise BaseModelError(f"{folder}: tensor {name} is missing")
    with safe_open(tensors[name].file, "pt") as file:
        return file.get_tensor(name)
