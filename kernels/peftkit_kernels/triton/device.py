"""What kernels ask of the card that they run on, each time the same answer."""

from functools import cache

import torch
from torch import Tensor

_MULTIPROCESSORS_WITHOUT_GPU = 8  # in Triton's interpreter, so that work is cut and shared out in tests


@cache
def capability_of(device: torch.device, interpreted: int) -> int:
    """Compute capability, 90 for 9.0; `interpreted` in Triton's interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else divmod(interpreted, 10)
    return 10 * major + minor


@cache
def multiprocessors_of(device: torch.device) -> int:
    """How many there are."""
    if device.type != "cuda":
        return _MULTIPROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def counters_of(operation: str, count: int, device: torch.device) -> Tensor:
    """An operation's int32 zeros (count,), which every launch leaves zero again: one stream at a time may run it."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def scratch_of(operation: str, count: int, device: torch.device) -> Tensor:
    """An operation's own uninitialised float32 memory (count,): one stream at a time may run it."""
    return torch.empty(count, dtype=torch.float32, device=device)
