"""What a forward pass keeps for its backward pass, and what is computed a second time.

    none       all that backward needs
    selective  of each layer its input and what its attention gave; all of the last `whole` layers
    full       of each layer its input
    offload    the same, but in pinned host memory: it goes there on a stream of its own while the next layer is
               computed, and comes back while the layer after it is computed backwards. On a CPU this is `full`

A layer is a decoder layer. What is computed again gives the same values, dropout among them, so that a level changes
neither losses nor gradients.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from peftkit.errors import RecipeError
from peftkit.methods import attached

Level = Literal["none", "selective", "full", "offload"]


@dataclass(frozen=True, slots=True)
class Recompute:
    """A level as it is set on a model."""

    level: Level = "none"
    whole: int = 0
    """Layers at the end of which `selective` keeps all."""

    def __str__(self) -> str:
        return f"{self.level}, {self.whole} layers whole" if self.level == "selective" else self.level


NOTHING = Recompute()


def set_recompute(model: PreTrainedModel, recompute: Recompute) -> None:
    """Sets a level on a model's decoder layers. Raises RecipeError for a base that doesn't support any but none."""
    layers = decoder_layers(model)
    if recompute.level != "none" and not (model.supports_gradient_checkpointing and layers):
        raise RecipeError("train.gradient_checkpointing: this base doesn't support it: set it to false")
    # a layer that draws nothing needs no generator's state, which takes the host longer than some kernels the GPU
    twice: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=_draws(model))
    runs = last = partial(twice, context_fn=_keeping) if recompute.level == "selective" else twice
    if recompute.level == "offload" and model.device.type == "cuda":
        runs = _Offload(twice)  # not of the last layer, whose input would come back as soon as it has left
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = recompute.level != "none" and index < len(layers) - recompute.whole
        layer._gradient_checkpointing_func = last if layer is layers[-1] else runs


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of a model that can be computed again, from the first on."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _draws(model: PreTrainedModel) -> bool:
    """Whether a layer draws random numbers: dropout of the adapter or of the base."""
    dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    settings = [getattr(method.config, "dropout", 0.0) for method in attached(model)]
    return any((getattr(model.config, "attention_dropout", 0.0), *dropouts, *settings))


# selective -----------------------------------------------------------------------------------------------------------


@cache
def _attention_operations() -> frozenset[Any]:
    """Operations that are dear to compute again beside what they give: attention, in all of its kernels."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
    return frozenset(getattr(torch.ops.aten, name).default for name in names)


class _Keep(TorchDispatchMode):
    """Keeps what attention gives in the first pass over a layer."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _attention_operations():
            self._kept.append(tree_map_only(Tensor, Tensor.detach, out))  # or a tensor would hold its own graph
        return out


class _Give(TorchDispatchMode):
    """Gives it in the second pass."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.popleft() if func in _attention_operations() else func(*args, **(kwargs or {}))


def _keeping() -> tuple[_Keep, _Give]:
    # torch's own selective checkpointing demands that both passes call every operation equally often, which a matrix
    # dequantised into a buffer that may hold it already doesn't
    kept: deque[Any] = deque()
    return _Keep(kept), _Give(kept)


# offload -------------------------------------------------------------------------------------------------------------

_LEAST_BYTES = 1 << 20
"""Smaller tensors stay where they are."""
_IN_FLIGHT = 2
"""Copies to the host that may be under way while later layers are computed."""


class _Parked:
    """A layer's input in pinned memory, and on its way back from there."""

    def __init__(self, held: Tensor, like: Tensor, pool: list[Tensor], before: "_Parked | None") -> None:
        self._held, self._pool = held, pool
        self.buffer = held[: like.nbytes].view(like.dtype).view(like.shape)
        self.device = like.device
        self.before = None if before is None else weakref.ref(before)
        """The layer before it, which backward comes to next."""
        self.landed: Tensor | None = None
        self.arrived = torch.cuda.Event()

    def __del__(self) -> None:
        self._pool.append(self._held)  # all copies are on one stream: the next one into it waits for this one out


class _Offload:
    """Computes layers as `full` does, with their inputs on the host in between."""

    def __init__(self, twice: Callable[..., Any]) -> None:
        self._twice = twice
        self._pool: list[Tensor] = []
        """Pinned memory that is free, as bytes: as many pieces as there are layers, each as large as a step needed."""
        self._stream: torch.cuda.Stream | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._newest: weakref.ref[_Parked] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        with saved_tensors_hooks(self._park, self._fetch):  # which see the layer's inputs alone
            return self._twice(function, *args)

    def _park(self, tensor: Tensor) -> Any:
        if tensor.device.type != "cuda" or tensor.nbytes < _LEAST_BYTES or isinstance(tensor, nn.Parameter):
            return tensor
        if isinstance(tensor, FakeTensor):  # a rehearsal, which has no streams
            return tensor.device, tensor.to("cpu")
        side, main = self._side(tensor.device), torch.cuda.current_stream(tensor.device)
        held = self._pool.pop() if self._pool else None
        if held is None or held.nbytes < tensor.nbytes:
            held = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        parked = _Parked(held, tensor, self._pool, self._newest and self._newest())
        side.wait_stream(main)
        with torch.cuda.stream(side):
            parked.buffer.copy_(tensor, non_blocking=True)
            gone = torch.cuda.Event()
            gone.record(side)
        self._leaving.append((tensor, gone))
        self._let_go(main, _IN_FLIGHT)
        self._newest = weakref.ref(parked)
        return parked

    def _fetch(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            device, tensor = packed
            return tensor.to(device)
        if not isinstance(packed, _Parked):
            return packed
        main = torch.cuda.current_stream(packed.device)
        self._let_go(main, 0)
        self._start(packed)
        main.wait_event(packed.arrived)
        tensor, packed.landed = packed.landed, None
        assert tensor is not None
        before = packed.before and packed.before()
        if before is not None:
            self._start(before)
        return tensor

    def _start(self, parked: _Parked) -> None:
        """Sends a layer's input back to the device, if it isn't on its way."""
        if parked.landed is not None:
            return
        side = self._side(parked.device)
        parked.landed = torch.empty(parked.buffer.shape, dtype=parked.buffer.dtype, device=parked.device)
        side.wait_stream(torch.cuda.current_stream(parked.device))  # where that memory was used before
        with torch.cuda.stream(side):
            parked.landed.copy_(parked.buffer, non_blocking=True)
            parked.arrived.record(side)

    def _let_go(self, main: torch.cuda.Stream, in_flight: int) -> None:
        """Frees inputs whose copies have gone, for what `main` does from here on."""
        while len(self._leaving) > in_flight:
            _, gone = self._leaving.popleft()
            main.wait_event(gone)

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream
