"""AdamW with moments in 8 bits (Dettmers et al. 2022), which takes one step over all large parameters of a group.

bitsandbytes goes from tensor to tensor, of which a LoRA on seven projections of 32 layers has 448, and waits for the
device after each. Here the large parameters lie end to end in one tensor, each from the start of a block of moments on:
all blocks are what they would be apart, and so are all bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

BLOCK = 256
"""Moments that share a scale."""

SMALL = 4096
"""Parameters with fewer elements have moments in 32 bits, as bitsandbytes has it."""

Group = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its group's flat tensor."""

    flat: nn.Parameter
    first: int
    """A multiple of BLOCK."""

    def of(self, field: str, held: Tensor, parameter: nn.Parameter) -> Tensor:
        """The parameter's part of what is remembered of the flat tensor."""
        count = parameter.numel()
        if field.startswith("absmax"):
            first = self.first // BLOCK
            return held[first : first + -(-count // BLOCK)]
        return held[self.first : self.first + count].view(parameter.shape)


class FlatAdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' optimiser over flat tensors, of which the parameters become views."""

    def __init__(self, groups: Sequence[Group], make: Callable[[list[Group]], torch.optim.Optimizer]) -> None:
        """make: bitsandbytes' optimiser of such groups."""
        self._members = [cast(list[nn.Parameter], group["params"]) for group in groups]
        self.places: dict[nn.Parameter, Place] = {}
        """The large parameters'."""
        self._flats: list[tuple[nn.Parameter, list[nn.Parameter], list[int]]] = []
        """Flat tensors, the parameters that lie in each from its beginning to its end, and the sizes of each parameter
        and of what is left of its last block."""
        inner = [{**group, "params": self._laid_out(group["params"])} for group in groups]
        self.inner = make(inner)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups  # one list: a rate that is set is the inner one's
        self.state = self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Lets go of the parameters' gradients."""
        for parameter in (one for members in self._members for one in members):
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step. A large parameter without a gradient counts as one whose gradient is zero."""
        assert closure is None
        into, grads = list[Tensor](), list[Tensor]()
        for flat, members, sizes in self._flats:
            flat.grad = torch.zeros_like(flat)
            parts = flat.grad.split_with_sizes(sizes)[::2]  # while this lasts, a GPU waits
            for one, part in zip(members, parts, strict=True):
                grad = one.grad
                if grad is not None:
                    into.append(part.view_as(grad))
                    grads.append(grad)
        if into:
            torch._foreach_copy_(into, grads)
        self.inner.step()
        for flat, *_ in self._flats:
            flat.grad = None

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begins to remember parameters, with bitsandbytes' tables, and paged where it pages.

        Moments begin as the codes of 0, as a step leaves them between parameters: bitsandbytes' own beginning, code 0,
        stands for the least number as soon as a block has a scale.
        """
        known = {id(self.places[one].flat if one in self.places else one) for one in parameters}
        begin: Any = self.inner.init_state  # type: ignore[attr-defined]
        for index, group in enumerate(self.param_groups):
            for place, one in enumerate(group["params"]):
                if id(one) in known:
                    begin(group, one, index, place)
                    state = self.state[one]
                    for moment in ("1", "2"):
                        if state[f"state{moment}"].dtype == torch.uint8:
                            state[f"state{moment}"].fill_(int(state[f"qmap{moment}"].abs().argmin()))

    def _laid_out(self, members: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What bitsandbytes is given: the large members' flat tensor, and the small ones."""
        large = [one for one in members if one.numel() >= SMALL]
        small = [one for one in members if one.numel() < SMALL]
        if not large:
            return small
        starts, sizes, total = list[int](), list[int](), 0
        for one in large:
            starts.append(total)
            sizes += one.numel(), -one.numel() % BLOCK
            total += sum(sizes[-2:])
        flat = nn.Parameter(torch.zeros(total, dtype=large[0].dtype, device=large[0].device))
        for one, first in zip(large, starts, strict=True):
            assert one.dtype == flat.dtype and one.device == flat.device, "an adapter's parameters are alike"
            place = self.places[one] = Place(flat, first)
            with torch.no_grad():
                view = place.of("data", flat.data, one)
                view.copy_(one)
                one.data = view
        self._flats.append((flat, large, sizes))
        return [flat, *small]
