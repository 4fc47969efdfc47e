"""Reading the weights of a frozen base."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from peftkit.base.divided import gathered
from peftkit.base.folder import stored_tensors
from peftkit.errors import BaseModelError, InputError
from peftkit_kernels import nf4_dequantize, nf4_dequantize_joined
from peftkit_kernels.checks import JOINED, NF4_JOINED_ELEMENTS
from peftkit_kernels.dispatch import unchecked

_nf4_dequantize, _nf4_dequantize_joined = unchecked(nf4_dequantize), unchecked(nf4_dequantize_joined)

JOINED_BYTES = 2**28
"""Most bytes of a matrix in 16 bits that is dequantised of several: those of gate and up of an 8B base, and more."""

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


class JoinedReader:
    """Dequantises weights that `can_join`, or one, into one matrix, again and again as a `Reader` does."""

    __slots__ = ("_arguments", "_seen", "weights")

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self._arguments: Any = None
        self._seen: list[tuple[Any, int, Tensor, Tensor, Tensor]] = []

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The rows of all weights in `dtype`."""
        if self._arguments is not None and self._are_as_seen():
            return _nf4_dequantize_joined(*self._arguments, dtype=dtype)
        self._arguments = None
        if not can_join(self.weights):
            return torch.cat([dequantized(weight, dtype) for weight in self.weights])
        states: list[Any] = [weight.quant_state for weight in self.weights]  # type: ignore[attr-defined]
        arguments = _joined(self.weights, states)
        if type(arguments[0][0]) is Tensor:  # not those of a rehearsal, which have no data
            self._arguments = arguments
            self._seen = [
                (state, weight.data_ptr(), state.absmax, state.offset, state.state2.absmax)
                for weight, state in zip(self.weights, states, strict=True)
            ]
        return _nf4_dequantize_joined(*arguments, dtype=dtype)

    def _are_as_seen(self) -> bool:
        """Whether each weight has the same state in the same places."""
        for weight, (state, place, absmax, offset, nested) in zip(self.weights, self._seen, strict=True):
            if weight.data_ptr() != place or weight.quant_state is not state:  # type: ignore[attr-defined]
                return False
            if state.absmax is not absmax or state.offset is not offset or state.state2.absmax is not nested:
                return False
        return True


def _joined(weights: Sequence[Tensor], states: Sequence[Any]) -> Any:
    """The arguments of `nf4_dequantize_joined` but for the dtype."""
    each = [_arguments(weight, state) for weight, state in zip(weights, states, strict=True)]
    *tables, shapes = zip(*each, strict=True)
    return *tables, tuple([rows for rows, _ in shapes]), shapes[0][1]


def can_join(weights: Sequence[Tensor]) -> bool:
    """Whether a `JoinedReader` reads weights with as many columns in one go, and in as much memory as is allowed."""
    states = [getattr(weight, "quant_state", None) for weight in weights]
    if len(weights) not in JOINED or not all([state is not None and _known(state) for state in states]):
        return False
    sizes = [state.shape.numel() for state in states if state is not None]
    whole = all([size % NF4_JOINED_ELEMENTS == 0 for size in sizes])
    fits = len(weights) == 1 or 2 * sum(sizes) <= JOINED_BYTES
    return whole and fits and all([weight.is_cuda for weight in weights])


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
