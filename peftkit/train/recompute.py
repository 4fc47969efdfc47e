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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from peftkit.errors import RecipeError

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
    runs: Callable[..., Any] = partial(run_twice, modes=_keeping) if recompute.level == "selective" else run_twice
    last = runs
    if recompute.level == "offload" and model.device.type == "cuda":
        runs = _Offload()  # not of the last layer, whose input would come back as soon as it has left
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = recompute.level != "none" and index < len(layers) - recompute.whole
        layer._gradient_checkpointing_func = last if layer is layers[-1] else runs


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of a model that can be computed again, from the first on."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# full ----------------------------------------------------------------------------------------------------------------

_Modes = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def run_twice(
    function: Callable[..., Any], *args: Any, modes: Callable[[], _Modes] = lambda: (nullcontext(), nullcontext())
) -> Any:
    """function(*args), which is called again when backward asks for what it saved; `modes` go round either call.

    What torch.utils.checkpoint does without re-entering backward, in a fraction of its Python: the second call ends as
    soon as it has saved all that the first one did, and draws the same random numbers. A layer that saves something
    else the second time raises RuntimeError.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    first, second = modes()
    again = _Again(function, args, second)
    before = again.generators()
    with saved_tensors_hooks(again.note, again.give), first:
        out = function(*args)
    again.drew(before)
    return out


class _Enough(Exception):
    """All that backward needs is there."""


class _Again:
    """The second call of a layer."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], mode: AbstractContextManager[Any]) -> None:
        self._function, self._mode = function, mode
        self._args = [None if isinstance(value, Tensor) else value for value in args]
        self._places = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        # saved as autograd saves them: hooks see them, and a change in place is found out
        anchor = torch.empty(0, requires_grad=True)
        # the output, not its node alone: up to torch 2.11 what a node saved goes with its last output
        self._inputs: Any = _Inputs.apply(anchor, *[args[place] for place in self._places])
        tensors = [args[place] for place in self._places]
        indices = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
        self._generators: list[torch.Generator] = []
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):  # a rehearsal has no numbers
            self._generators = [torch.default_generator, *[torch.cuda.default_generators[one] for one in indices]]
        self._states: list[Tensor] | None = None
        """Of the generators before the first call, if it drew any number."""
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        """Of each tensor that the first call saved."""
        self._saved: list[Tensor | None] = []

    def generators(self) -> list[Tensor]:
        """Their states."""
        return [generator.get_state() for generator in self._generators]

    def drew(self, before: list[Tensor]) -> None:
        """Keeps the states that the generators had, if they have others now."""
        after = self.generators()
        if any(bytes(one.numpy()) != bytes(other.numpy()) for one, other in zip(before, after, strict=True)):
            self._states = before

    def note(self, tensor: Tensor) -> int:
        """Takes a tensor that the first call saves; gives its number."""
        self._kinds.append((tensor.shape, tensor.dtype))
        return len(self._kinds) - 1

    def give(self, number: int) -> Tensor:
        """The tensor of a number, as the second call saved it. Each is given once, or else is made again."""
        if not self._saved or self._saved[number] is None:
            self._run()
        tensor, self._saved[number] = self._saved[number], None
        assert tensor is not None
        return tensor

    def _run(self) -> None:
        args = list(self._args)
        for place, tensor in zip(self._places, self._inputs.grad_fn.saved_tensors, strict=True):
            args[place] = tensor
        self._saved = []
        now = self.generators() if self._states else []
        try:
            self._set(self._states or [])
            with saved_tensors_hooks(self._keep, _same), torch.enable_grad(), self._mode:
                self._function(*args)
        except _Enough:
            return
        finally:
            self._set(now)
        raise RuntimeError(f"a layer saves {len(self._saved)} tensors when computed again, not {len(self._kinds)}")

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def _keep(self, tensor: Tensor) -> Tensor:
        shape, dtype = self._kinds[len(self._saved)]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise RuntimeError(
                f"a layer saves {tensor.dtype} {[*tensor.shape]} when computed again, not {dtype} {[*shape]}"
            )
        if tensor.requires_grad:
            tensor = tensor.detach()  # or what a node gives, and saves, would hold the node
        self._saved.append(tensor)
        if len(self._saved) == len(self._kinds):
            raise _Enough
        return tensor


class _Inputs(torch.autograd.Function):
    """Saves tensors, under a node of its own that no backward pass comes to."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _same(tensor: Tensor) -> Tensor:
    return tensor


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

    def __init__(self) -> None:
        self._pool: list[Tensor] = []
        """Pinned memory that is free, as bytes: as many pieces as there are layers, each as large as a step needed."""
        self._stream: torch.cuda.Stream | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._newest: weakref.ref[_Parked] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        with saved_tensors_hooks(self._park, self._fetch):  # which see the layer's inputs alone
            return run_twice(function, *args)

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
