"""Programmatic dependent launch: on compute capability 9.0 and above a kernel begins while the one before it runs.

A kernel that is launched so calls `wait_turn` before it reads or writes anything. Before that it may compute, and give
hints to the cache, which change no result whoever writes what. Every program calls it, early returns included, so that
the end of a kernel is the end of all before it, also for the next one, which may have begun long before.
"""
# pyright: reportMissingParameterType=false

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def has_dependents(device: torch.device) -> int:
    """Whether kernels on a device can begin before the last one has ended."""
    return int(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def launch_options(dependent: int) -> dict[str, bool]:
    """What a launch of a kernel that calls `wait_turn` says to Triton."""
    return {"launch_pdl": True} if dependent else {}


@triton.jit
def wait_turn(DEPENDENT: tl.constexpr):
    """Waits for the end of the kernel before, and lets the next one begin."""
    if DEPENDENT == 2:
        gdc_launch_dependents()
    gdc_wait()
    if DEPENDENT == 1:
        gdc_launch_dependents()
