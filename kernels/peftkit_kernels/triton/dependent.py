"""Programmatic dependent launch: on compute capability 9.0 and above a kernel begins while the one before it runs.

A kernel that is launched so calls `wait_turn` before it reads or writes what another kernel of a step writes or reads.
Before that it may compute, load what is constant, and give hints to the cache. A LoRA's shrink beside its product has
rules of its own (`lora`). Every program calls it, early returns included, so that
the end of a kernel is the end of all before it, also for the next one, which may have begun long before.
"""
# pyright: reportMissingParameterType=false

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peftkit_kernels.triton.device import capability_of

MAX_ROWS = 64
"""Of steps whose kernels begin early."""


def begins_early(device: torch.device, num_rows: int) -> bool:
    """Whether a kernel over so many rows is to begin before the last one has ended."""
    return num_rows <= MAX_ROWS and has_dependents(device)


def has_dependents(device: torch.device) -> bool:
    """Whether kernels on a device can begin before the last one has ended."""
    return capability_of(device, 0) >= 90


def launch_options(dependent: bool) -> dict[str, bool]:
    """What a launch of a kernel that calls `wait_turn` says to Triton."""
    return {"launch_pdl": True} if dependent else {}


@triton.jit
def wait_turn():
    """Waits for the end of the kernel before, and lets the next one begin."""
    gdc_wait()
    gdc_launch_dependents()
