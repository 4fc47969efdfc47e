"""The mathematics of merging one weight.

For a frozen weight W (out, in) and a LoRA with A (r, in), B (out, r) and scale s:

    W' = cast(dequantise(W) + s · B A)

The product and the sum are float32 and there is one cast, at the end: a sum in bfloat16 would round small updates away.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peftkit.errors import InputError, RunError
from peftkit.methods import LoraConfig
from peftkit.methods.lora import PREFIX


@dataclass(frozen=True, slots=True)
class Update:
    """What an adapter adds to one weight, kept as its factors."""

    lora_A: Tensor
    """(r, in)"""
    lora_B: Tensor
    """(out, r)"""
    scale: float

    def dense(self, device: torch.device) -> Tensor:
        """ΔW = s · B A, float32 (out, in) on `device`."""
        return (self.lora_B.to(device, torch.float32) @ self.lora_A.to(device, torch.float32)) * self.scale


def lora_updates(
    config: LoraConfig, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Update]:
    """Module path → update, for a LoRA whose tensors were checked against modules of the given (out, in) shapes."""
    return {
        path: Update(
            lora_A=tensors[f"{PREFIX}{path}.lora_A.weight"],
            lora_B=tensors[f"{PREFIX}{path}.lora_B.weight"],
            scale=site.scale,
        )
        for path, site in config.resolve(shapes).items()
    }


def dequantized(weight: Tensor) -> Tensor:
    """A weight as its layer multiplies by it: NF4 dequantised exactly as bitsandbytes does, any other as it is.

    Raises InputError for NF4 weights that a forward pass has repacked for the CPU, which rounds their scales.
    """
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    if getattr(state, "packing_format_for_cpu", False):
        raise InputError("the 4-bit weights were repacked by a forward pass on this CPU: load the base afresh to merge")
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)


def merged_weight(name: str, weight: Tensor, update: Update | None, dtype: torch.dtype) -> Tensor:
    """A fresh `weight` with its update, if it has one, in `dtype`. `name` stands for it in errors.

    Raises RunError when a value doesn't fit into `dtype`.
    """
    full = dequantized(weight)
    if update is not None:
        full = full.float() + update.dense(full.device)
    merged = full.to(dtype, copy=True)
    if dtype == torch.float16 and not torch.isfinite(merged).all():
        raise RunError(f"{name} has values too large for float16: choose bfloat16 or float32")
    return merged
