"""Reading the weights of a frozen base."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from peftkit.base.divided import gathered
from peftkit.base.folder import stored_tensors
from peftkit.errors import BaseModelError, InputError
from peftkit_kernels import nf4_dequantize
from peftkit_kernels.dispatch import unchecked

_nf4_dequantize = unchecked(nf4_dequantize)

_Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[int, int]]


def dequantized(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A weight as its layer multiplies by it: NF4 dequantised exactly as bitsandbytes does, any other as it is.

    `dtype` None is the weight's own. Raises InputError for NF4 weights that a forward pass has repacked for the CPU,
    which rounds their scales.
    """
    weight = gathered(weight)
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach() if dtype is None else weight.detach().to(dtype)
    if getattr(state, "packing_format_for_cpu", False):
        raise InputError("the 4-bit weights were repacked by a forward pass on this CPU: load the base afresh")
    wanted: torch.dtype = dtype or state.dtype
    if weight.is_cuda and _known(state):
        return nf4_dequantize(*_arguments(weight, state), wanted)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).to(wanted)


class Reader:
    """Dequantises one weight again and again, with the same checks made and the same views taken once.

    They are made and taken anew when any tensor of the weight has moved.
    """

    __slots__ = ("_arguments", "_places", "_state", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._arguments: _Arguments | None = None
        self._state: Any = None
        self._places: tuple[int, ...] = ()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """See `dequantized`; for a weight that isn't in 4 bits and has the dtype it is the weight itself."""
        weight = self.weight
        state = getattr(weight, "quant_state", None)
        if state is None:
            return weight if weight.dtype == dtype else weight.detach().to(dtype)
        if self._arguments is not None and state is self._state and _places(weight, state) == self._places:
            return _nf4_dequantize(*self._arguments, dtype)
        self._arguments = None
        if weight.is_cuda and _known(state):
            arguments = _arguments(weight, state)
            if type(arguments[0]) is Tensor:  # not those of a rehearsal, which have no data
                self._arguments, self._state, self._places = arguments, state, _places(weight, state)
        return dequantized(weight, dtype)


def _arguments(weight: Tensor, state: Any) -> _Arguments:
    """Those of `nf4_dequantize` but for the dtype."""
    code_X = weight.detach().as_subclass(Tensor).view(torch.uint8).view(-1)
    nested = state.state2
    return code_X, state.absmax, nested.code, nested.absmax, state.offset.reshape(()), tuple(state.shape)


def _places(weight: Tensor, state: Any) -> tuple[int, ...]:
    nested = state.state2
    tensors = (weight, state.absmax, nested.code, nested.absmax, state.offset)
    return tuple([tensor.data_ptr() for tensor in tensors])


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
