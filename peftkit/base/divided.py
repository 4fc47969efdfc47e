"""The decoder layers of a frozen base, divided over the processes of a run.

A layer's frozen tensors, 4-bit codes and their scales among them, are laid end to end as bytes. Of W processes each
keeps one piece:

    piece_r = layer_U[r·U/W : (r+1)·U/W]           for good
    layer_U = all_gather(piece_0 … piece_W-1)      before the layer's forward pass, and again before its backward pass

Two buffers hold whole layers, those of even and those of odd places, and a layer's parameters are views of one of them
for good. So what autograd and fused steps keep of a weight is right again as soon as the layer is gathered again, and
nothing else of it is held. The layer that comes next is gathered into the other buffer meanwhile. What is trained, the
embeddings, the last norm and the tables of 4-bit codes stay whole.

Gathering takes all processes, each at the same layer. So they make equally many passes, or say so: `unequal_passes`.

FSDP2 isn't used: it makes DTensors of parameters, which lose `quant_state` and are other objects in each pass, leaves
the scales whole, and copies what it has gathered once more.

U bytes of a layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from transformers import PreTrainedModel

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
_ALIGNED = 128
"""Bytes at multiples of which tensors begin, for a GPU's widest loads."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a layer: an attribute of a parameter or of bitsandbytes' state beside it."""

    holder: Any
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    num_bytes: int

    def put(self, layer_U: Tensor) -> None:
        """Makes the attribute a view of the layer's bytes."""
        bytes_U = layer_U[self.start : self.start + self.num_bytes]
        setattr(self.holder, self.name, bytes_U.view(self.dtype).view(self.shape))


class DividedBase:
    """This process's share of a base, and the order in which layers are gathered; on the model that it is made of."""

    def __init__(self, model: PreTrainedModel, fill: Callable[[int], None] | None = None) -> None:
        """Takes the layers apart, one at a time; all processes of the default group do. `fill` gives a layer its data
        before, where it has none."""
        rank, self._count = dist.get_rank(), dist.get_world_size()
        trunk: Any = model.base_model
        layers: list[nn.Module] = list(trunk.layers)
        self._pieces: list[Tensor] = []
        parts: list[list[_Part]] = []
        self.whole_bytes = 0
        """Of the layers before they were divided."""
        for index, layer in enumerate(layers):
            if fill is not None:
                fill(index)
            layer_U, own = _laid_out(layer, self._count)
            self._pieces.append(layer_U.chunk(self._count)[rank].clone())
            self.whole_bytes += sum(part.num_bytes for part in own)
            for part in own:  # or the layer would stay until all are divided
                setattr(part.holder, part.name, layer_U.new_empty(0, dtype=part.dtype))
            parts.append(own)
        most = max(len(piece_U) for piece_U in self._pieces) * self._count
        self._buffers = [self._pieces[0].new_empty(most) for _ in layers[:2]]
        self._inside: list[int | None] = [None] * len(self._buffers)
        """The layer that each buffer holds, or will when its gathering is done."""
        self._under_way: list[Any] = [None] * len(self._buffers)
        self._unequal = False
        for index, (layer, own) in enumerate(zip(layers, parts, strict=True)):
            for part in own:
                part.put(self._whole(index))
            for parameter in layer.parameters():
                vars(parameter)["gathered"] = partial(self._enter, index, 0)
            layer.register_forward_pre_hook(partial(self._before, index))
            layer.register_forward_hook(partial(self._after, index))

    @property
    def held_bytes(self) -> int:
        """What this process holds of the layers: its pieces and the buffers."""
        return sum(tensor.nbytes for tensor in (*self._pieces, *self._buffers))

    @contextmanager
    def unequal_passes(self) -> Iterator[None]:
        """See the function of this name."""
        self._unequal = True
        try:
            yield
        finally:
            self._unequal = False
        while self._anyone(at_work=False):
            for index in range(len(self._pieces)):
                self._enter(index, 1)

    def _before(self, index: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        if active_fake_mode() is not None:  # a rehearsal, which has no data
            return
        if index == 0 and self._unequal:
            assert not torch.is_grad_enabled(), "a backward pass needs as many of it in every process"
            self._anyone(at_work=True)
        # a layer that backward computes again was gathered for that, and what is on its way then is the one before it
        self._enter(index, 1 if torch._C._current_graph_task_id() == -1 else 0)

    def _after(self, index: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden_BTH: Tensor = output if isinstance(output, Tensor) else output[0]
        if hidden_BTH.requires_grad and active_fake_mode() is None:
            hidden_BTH.register_hook(lambda _: self._enter(index, -1))

    def _enter(self, index: int, direction: int) -> None:
        """Waits until a layer is whole and sends for the next one in a direction."""
        self._send_for(index)
        self._wait(index % len(self._buffers))
        if direction and 0 <= index + direction < len(self._pieces):
            self._send_for(index + direction)

    def _send_for(self, index: int) -> None:
        buffer = index % len(self._buffers)
        if self._inside[buffer] == index:
            return
        self._wait(buffer)
        # on a GPU this runs beside what follows, and after all that was queued so far: the layer that was in the buffer
        work = _all_gather(self._whole(index), self._pieces[index], async_op=True)
        self._inside[buffer], self._under_way[buffer] = index, work

    def _wait(self, buffer: int) -> None:
        work, self._under_way[buffer] = self._under_way[buffer], None
        if work is not None:
            work.wait()

    def _whole(self, index: int) -> Tensor:
        return self._buffers[index % len(self._buffers)][: len(self._pieces[index]) * self._count]

    def _anyone(self, *, at_work: bool) -> bool:
        """Whether any process begins another pass."""
        flag = torch.tensor(int(at_work), device=self._pieces[0].device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())


def divide(model: PreTrainedModel, fill: Callable[[int], None] | None = None) -> DividedBase:
    """Divides a bare frozen base's layers over the processes of the default group, for good; see `DividedBase`."""
    divided = model.__dict__["peftkit_divided"] = DividedBase(model, fill)
    return divided


def division(model: nn.Module) -> DividedBase | None:
    """How a base is divided, if it is."""
    return model.__dict__.get("peftkit_divided")


@contextmanager
def unequal_passes(model: PreTrainedModel) -> Iterator[None]:
    """Inside, each process makes as many forward passes without gradients as it likes; a base that isn't divided
    doesn't mind. At the end a process waits for the others and takes part in their gathering."""
    divided = division(model)
    if divided is None:
        yield
    else:
        with divided.unequal_passes():
            yield


def gathered(weight: Tensor) -> Tensor:
    """A weight to be read outside its layer's passes, with its bytes in place: all processes read it together."""
    gather = getattr(weight, "gathered", None)
    if gather is not None:
        gather()
    return weight


def _laid_out(layer: nn.Module, count: int) -> tuple[Tensor, list[_Part]]:
    """A layer's frozen tensors as bytes (U,), U a multiple of `count`, and where in them each is."""
    held: list[tuple[Any, str]] = []
    for parameter in layer.parameters():
        assert not parameter.requires_grad, "a base is divided before an adapter is attached"
        held.append((parameter, "data"))
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            held += [(state, name) for name in ("absmax", "offset") if getattr(state, name) is not None]
        nested = getattr(state, "state2", None)
        if nested is not None:
            held.append((nested, "absmax"))
    parts: list[_Part] = []
    values: list[Tensor] = []
    end = 0
    for holder, name in held:
        value: Tensor = getattr(holder, name).detach().as_subclass(Tensor)
        parts.append(_Part(holder, name, value.shape, value.dtype, end, value.nbytes))
        values.append(value)
        end += -(-value.nbytes // _ALIGNED) * _ALIGNED
    layer_U = values[0].new_zeros(-(-end // (count * _ALIGNED)) * count * _ALIGNED, dtype=torch.uint8)
    for part, value in zip(parts, values, strict=True):
        layer_U[part.start : part.start + part.num_bytes] = value.contiguous().view(-1).view(torch.uint8)
    return layer_U, parts
