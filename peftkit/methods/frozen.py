"""Reading the weights of a frozen base."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from peftkit.base.folder import stored_tensors
from peftkit.errors import BaseModelError, InputError
from peftkit_kernels import nf4_dequantize


def dequantized(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A weight as its layer multiplies by it: NF4 dequantised exactly as bitsandbytes does, any other as it is.

    `dtype` None is the weight's own. Raises InputError for NF4 weights that a forward pass has repacked for the CPU,
    which rounds their scales.
    """
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach() if dtype is None else weight.detach().to(dtype)
    if getattr(state, "packing_format_for_cpu", False):
        raise InputError("the 4-bit weights were repacked by a forward pass on this CPU: load the base afresh")
    wanted: torch.dtype = dtype or state.dtype
    if weight.is_cuda and _known(state):
        code_X = weight.detach().as_subclass(Tensor).view(torch.uint8).view(-1)
        scales = (state.absmax, state.state2.code, state.state2.absmax, state.offset.reshape(()))
        return nf4_dequantize(code_X, *scales, tuple(state.shape), wanted)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).to(wanted)


def _known(state: Any) -> bool:
    """Whether a bitsandbytes state is of the layout of `nf4_dequantize`: NF4 with scales in 8 bits."""
    nested = state.state2
    return nested is not None and (state.quant_type, state.blocksize, nested.blocksize) == ("nf4", 64, 256)


def stored(folder: Path, name: str) -> Tensor:
    """A tensor of a base's folder as it is stored, on the CPU. Raises BaseModelError where there is none."""
    tensors = stored_tensors(folder)
    if name not in tensors:
        raise BaseModelError(f"{folder}: tensor {name} is missing")
    with safe_open(tensors[name].file, "pt") as file:
        return file.get_tensor(name)
