"""Where a captured step finds its inputs: fields at places that never change, in a pinned buffer and on the device.

All fields go to the device in one copy, and block tables behind them, as wide as the longest one of the step; there
they are copied to their place, which is as wide as the longest one of any step.
"""

from collections.abc import Mapping
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_serve.batch import Extras

_ALIGN = 64  # bytes: kernels are compiled for aligned pointers
_MIN_TABLE = 8  # pages of the narrowest staged block table


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, by way of pinned memory, so that nobody waits for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Reach(IntEnum):
    """What the adapters of a captured step may have: what they can't have isn't launched."""

    ATTENTION = 0
    """LoRA on q, k, v and o."""
    LINEARS = 1
    """LoRA on gate, up and down too."""
    ALL = 2
    """Bottlenecks and a LoRA of the output embedding too."""

    @classmethod
    def of(cls, extras: Extras) -> "Reach":
        """The least that holds adapters with these extras; the decoder's ends are for no captured step."""
        if extras.bottlenecks or extras.head_lora:
            return cls.ALL
        return cls.LINEARS if extras.feed_forward else cls.ATTENTION

    @property
    def extras(self) -> Extras:
        """What is launched."""
        return Extras(self >= Reach.LINEARS, self >= Reach.ALL, self >= Reach.ALL, ends=False)


class Bucket(NamedTuple):
    """The sizes that a captured step is padded to, and what its adapters may have."""

    num_tokens: int
    num_rows: int
    """Requests; as many as tokens where each has a single new one."""
    num_segments: int
    """0: all rows are the bare base's."""
    reach: Reach


class Staging:
    """The buffers. Used on the thread that steps."""

    def __init__(self, sizes: Mapping[str, tuple[int, torch.dtype]], page_NM: Tensor) -> None:
        """
        sizes: entries and dtype of each field.
        page_NM: the block tables of captured steps, int32, on the device; steps that never run at once may share it.
        """
        device = page_NM.device
        lengths = [-(-count * dtype.itemsize // _ALIGN) * _ALIGN for count, dtype in sizes.values()]
        starts = dict(zip(sizes, accumulate(lengths, initial=0), strict=False))
        self._num_fixed = sum(lengths)
        self._max_rows, self._max_pages = page_NM.shape
        num_bytes = self._num_fixed + page_NM.nbytes
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

        def field(buffer: Tensor, name: str) -> Tensor:
            count, dtype = sizes[name]
            return buffer[starts[name] :][: count * dtype.itemsize].view(dtype)

        self.host: dict[str, NDArray[Any]] = {name: field(self._staging, name).numpy() for name in sizes}
        self.at = {name: field(self._staged, name) for name in sizes}
        """The fields on the device."""
        self.page_NM = page_NM
        self.table_NM: NDArray[np.int32] = np.zeros((self._max_rows, 0), np.int32)
        """The staged block tables, on the host."""

    def wait(self) -> None:
        """Until the host's side may be written again: the copy of the step before lies behind a step whose tokens have
        been seen."""
        if self._copied is not None:
            self._copied.synchronize()

    def make_room(self, num_pages: int) -> bool:
        """Makes the staged tables wide enough for so many pages, rounded up so that few steps change the width; whether
        it did, so that what they held is lost."""
        width = min(self._max_pages, max(_MIN_TABLE, 1 << (num_pages - 1).bit_length()))
        if width <= self.table_NM.shape[1] <= 4 * width:
            return False
        room = self._staging[self._num_fixed :][: 4 * width * self._max_rows]
        self.table_NM = room.view(torch.int32).view(-1, width).numpy()
        return True

    def copy(self, num_rows: int) -> None:
        """Begins the copy of all fields and of the first rows' block tables to the device."""
        width = self.table_NM.shape[1]
        num_bytes = self._num_fixed + 4 * width * num_rows
        self._staged[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        staged_NM = self._staged[self._num_fixed : num_bytes].view(torch.int32).view(num_rows, width)
        self.page_NM[:num_rows, :width].copy_(staged_NM)
