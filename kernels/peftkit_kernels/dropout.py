"""Dropout whose mask is made from a seed whenever it is needed, and never kept."""

import torch
from torch import Tensor

from peftkit_kernels.dispatch import dispatched

MAX_ELEMENTS = 2**32
"""An element's place is hashed as 32 bits."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LOW = 2**32 - 1


def check(x_NI: Tensor, seed: Tensor, share: float) -> None:
    """Raises ValueError for arguments that `seeded_dropout` doesn't take."""
    if x_NI.dim() != 2 or x_NI.dtype not in _FLOATS or x_NI.numel() > MAX_ELEMENTS:
        raise ValueError(f"x_NI is {x_NI.dtype} of shape {list(x_NI.shape)}: a floating matrix of 2³² elements is most")
    if seed.dtype != torch.int64 or seed.dim() or seed.device != x_NI.device:
        raise ValueError(f"seed is {seed.dtype} of shape {list(seed.shape)} on {seed.device}: int64 of no dimension")
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share is {share}: from 0 to below 1 is wanted")


def reference(x_NI: Tensor, seed: Tensor, share: float) -> Tensor:
    """Drops a share of x's elements and scales up the others; its own gradient, called with dy in the place of x.

    Semantics, for element e of the flattened matrix, modulo 2³², with `mix` a finaliser of 32 bits:
        u = mix(mix(e ^ low 32 bits of seed) + high 32 bits of seed)
        y[e] = x[e] / (1 - share) if u >= share * 2³² else 0
    Returns a fresh y_NI in x's dtype.
    """
    place = torch.arange(x_NI.numel(), device=x_NI.device).view(x_NI.shape)
    u = _mix((_mix(place ^ (seed & _LOW)) + (seed >> 32 & _LOW)) & _LOW)
    return torch.where(u >= threshold(share), x_NI / (1.0 - share), 0.0)


def threshold(share: float) -> int:
    """The least u of an element that is kept."""
    return min(int(share * 2**32), _LOW)


def _mix(u: Tensor) -> Tensor:
    u = (u ^ u >> 16) * 0x7FEB352D & _LOW
    u = (u ^ u >> 15) * 0x846CA68B & _LOW
    return u ^ u >> 16


reference.__name__ = "seeded_dropout"
seeded_dropout = dispatched(check)(reference)
