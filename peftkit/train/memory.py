"""What a run needs in memory, by part.

    weights      bytes of the base as it is held (4-bit codes and scales where it is quantised); of one divided over
                 processes this one's share and two gathered layers
    adapter      4 bytes for each trainable parameter
    gradients    4 bytes for each
    optimizer    8 bytes for each: AdamW's two float32 moments, or 2 for 8-bit ones
    activations  what backward keeps of the fullest micro-batch and what is worked on then, by a rehearsal of the step;
                 a LoRA's A and B in the base's dtype are among it
    logits       the chunk of logits that is there at that moment, its softmax and gradient
    process      on a CPU what this process holds besides, the interpreter and libraries; on a GPU cuBLAS' workspaces

The peak that a run reports is the sum: of a GPU what torch has allocated, else what is resident of the process.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from peftkit.base.divided import division
from peftkit.data.sampler import Shape
from peftkit.train.rehearsal import StepMemory, rehearse

_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of each part while training."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    process: int

    def parts(self) -> dict[str, int]:
        """Name of each part → bytes."""
        return asdict(self)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts().values())


def estimate_memory(
    model: PreTrainedModel,
    shapes: Sequence[Shape],
    *,
    packed: bool,
    moments_8bit: bool = False,
    layers: int | None = None,
) -> MemoryEstimate:
    """The estimate for micro-batches of these shapes on a model that has its adapter.

    With `layers` a step goes through the first of them alone; the weights are still those of all.
    """
    held = _resident_bytes() if model.device.type == "cpu" else 0  # before a rehearsal imports anything
    trainable, weights = num_trainable(model), weight_bytes(model)
    fullest = {max(shapes, key=lambda shape: shape.rows * shape.length), max(shapes, key=lambda shape: shape.targets)}
    step = max(
        (rehearse(model, shape, packed=packed, layers=layers) for shape in fullest), key=lambda memory: memory.total
    )
    return _estimate(model, trainable, weights, step, held, moments_8bit)


def _estimate(
    model: PreTrainedModel, trainable: int, weights: int, step: StepMemory, held: int, moments_8bit: bool
) -> MemoryEstimate:
    on_cpu = model.device.type == "cpu"
    return MemoryEstimate(
        weights=weights,
        adapter=4 * trainable,
        gradients=4 * trainable,
        optimizer=(2 if moments_8bit else 8) * trainable,
        activations=step.activations,
        logits=step.logits,
        process=max(held - weights - 4 * trainable, 0) if on_cpu else _workspace_bytes(model.device),
    )


def return_freed_memory() -> None:
    """Makes glibc give blocks of 1 MiB and more back when they are freed.

    Else it keeps blocks of up to 32 MiB, and a step holds up to five times what is in use. Elsewhere nothing is done.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def available_memory(device: torch.device) -> int:
    """Bytes that this process may hold on a device in all: what it holds already, and what is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    import psutil

    return psutil.virtual_memory().available + _resident_bytes()


def free_memory(device: torch.device) -> int:
    """Bytes that this process may take on a device beside what it holds."""
    return available_memory(device) - held_memory(device)


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds on a device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident_bytes()


def _resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _workspace_bytes(device: torch.device) -> int:
    """cuBLAS' workspaces: one for the thread of the forward pass, one for that of the backward pass."""
    return 2 * (32 if torch.cuda.get_device_capability(device) >= (9, 0) else 8) * 2**20


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: allocated on the GPU, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # getrusage counts what the process was before it became this program
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    import resource  # not on Windows, where only a GPU's peak is known

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def num_trainable(model: PreTrainedModel) -> int:
    """Trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def num_base(model: PreTrainedModel) -> int:
    """Parameters of the frozen base; a 4-bit weight counts by its shape, not by its packed bytes."""
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
            total += shape.numel()
    return total


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the frozen weights as they are held, with a quantised weight's scales; a tied weight counts once, and
    of a divided base what this process holds."""
    divided = division(model)
    total = 0 if divided is None else divided.held_bytes - divided.whole_bytes
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        total += parameter.numel() * parameter.element_size()
        total += _scale_bytes(getattr(parameter, "quant_state", None))
    return total + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def _scale_bytes(quant_state: object) -> int:
    """Bytes of bitsandbytes' scales beside a 4-bit weight, those of a double quantisation among them."""
    total = 0
    for name in ("absmax", "offset"):
        tensor = getattr(quant_state, name, None)
        total += tensor.numel() * tensor.element_size() if tensor is not None else 0
    nested = getattr(quant_state, "state2", None)
    return total + (_scale_bytes(nested) if nested is not None else 0)
