"""The mathematics of merging one weight.

For a frozen weight W (out, in) and a LoRA with A (r, in), B (out, r) and scale s:

    W' = cast(dequantise(W) + s · B A)

and for DoRA with magnitudes m (out,), by row,

    W' = cast(m / ‖dequantise(W) + s · B A‖ ∘ (dequantise(W) + s · B A))

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
    magnitude: Tensor | None = None
    """DoRA's m (out,)."""

    def applied(self, weight: Tensor) -> Tensor:
        """The updated weight, float32 (out, in), of a dequantised one."""
        device = weight.device
        product = self.lora_B.to(device, torch.float32) @ self.lora_A.to(device, torch.float32)
        updated = weight.float() + product * self.scale
        if self.magnitude is None:
            return updated
        return updated * (self.magnitude.to(device, torch.float32) / updated.norm(dim=1))[:, None]


def lora_updates(
    config: LoraConfig, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Update]:
    """Module path → update, for a LoRA whose tensors were checked against modules of the given (out, in) shapes."""
    return {
        path: Update(
            lora_A=tensors[f"{PREFIX}{path}.lora_A.weight"],
            lora_B=tensors[f"{PREFIX}{path}.lora_B.weight"],
            scale=site.scale,
            magnitude=tensors.get(f"{PREFIX}{path}.lora_magnitude_vector"),
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
        full = update.applied(full)
    merged = full.to(dtype, copy=True)
    if dtype == torch.float16 and not torch.isfinite(merged).all():
        raise RunError(f"{name} has values too large for float16: choose bfloat16 or float32")
    return merged
