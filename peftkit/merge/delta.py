"""The mathematics of merging one weight.

For a frozen weight W (out, in) and a LoRA with A (r, in), B (out, r) and scale s:

    W' = cast(dequantise(W) + s · B A)

and for DoRA with magnitudes m (out,), by row,

    W' = cast(m / ‖dequantise(W) + s · B A‖ ∘ (dequantise(W) + s · B A))

An embedding (tokens, width) is the transpose of the W that its LoRA sees. A LoRA's bias b turns the layer's into
bias + s · b; whole modules and token rows stand in the place of the base's. The product and the sum are float32 and
there is one cast, at the end: a sum in bfloat16 would round small updates away.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peftkit.errors import RunError, UnsupportedError
from peftkit.methods import LoraConfig
from peftkit.methods.frozen import dequantized
from peftkit.methods.lora import EMBEDDING, HEAD, PREFIX
from peftkit.methods.lora_layers import SMALLEST_NORM, LoraEmbedding, LoraLinear, TokenRows
from peftkit.methods.method import matrices


class Change(Protocol):
    """What an adapter does to one parameter."""

    def applied(self, weight: Tensor) -> Tensor:
        """The changed parameter, float32, of a dequantised one."""
        ...


@dataclass(frozen=True, slots=True)
class Update:
    """A low-rank update, kept as its factors."""

    lora_A: Tensor
    """(r, in)"""
    lora_B: Tensor
    """(out, r)"""
    scale: float
    magnitude: Tensor | None = None
    """DoRA's m (out,)."""
    embedding: bool = False

    def applied(self, weight: Tensor) -> Tensor:
        device = weight.device
        product = self.lora_B.to(device, torch.float32) @ self.lora_A.to(device, torch.float32)
        updated = (weight.T if self.embedding else weight).float() + product * self.scale
        if self.magnitude is not None:
            norms = updated.norm(dim=1).clamp(min=SMALLEST_NORM)
            updated = updated * (self.magnitude.to(device, torch.float32) / norms)[:, None]
        return updated.T if self.embedding else updated


@dataclass(frozen=True, slots=True)
class Added:
    """A bias (out,) that comes on top."""

    bias: Tensor
    scale: float

    def applied(self, weight: Tensor) -> Tensor:
        return weight.float() + self.bias.to(weight.device, torch.float32) * self.scale


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another parameter of the same shape, or with `ids` some of its rows."""

    rows: Tensor
    ids: tuple[int, ...] | None = None

    def applied(self, weight: Tensor) -> Tensor:
        rows = self.rows.to(weight.device, torch.float32)
        if self.ids is None:
            return rows
        return weight.float().index_copy(0, torch.tensor(self.ids, device=weight.device), rows)


def lora_changes(
    config: LoraConfig, tensors: Mapping[str, Tensor], parameters: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, Change]:
    """Name of a base's parameter → what a LoRA does to it.

    `tensors`, by PEFT key, were checked against the base, whose `parameters` have these shapes. In a tied base the
    output embedding goes by `lm_head.weight`. Raises UnsupportedError for a LoRA bias on a layer without a bias.
    """
    shapes = matrices(parameters)
    changes: dict[str, Change] = {}
    for path, site in config.resolve(shapes).items():
        layer, key = (LoraEmbedding if site.embedding else LoraLinear), f"{PREFIX}{path}"
        changes[f"{path}.weight"] = Update(
            lora_A=tensors[f"{key}.{layer.NAME_A}"],
            lora_B=tensors[f"{key}.{layer.NAME_B}"],
            scale=site.scale,
            magnitude=tensors.get(f"{key}.lora_magnitude_vector"),
            embedding=site.embedding,
        )
        if (bias := tensors.get(f"{key}.lora_B.bias")) is not None:
            if f"{path}.bias" not in parameters:
                raise UnsupportedError(f"lora_bias: {path} has no bias that its LoRA's could be merged into")
            changes[f"{path}.bias"] = Added(bias, site.scale)
    for path, names in config.saved(parameters).items():
        changes |= {f"{path}.{name}": Replaced(tensors[f"{PREFIX}{path}.{name}"]) for name in names}
    for path, ids in config.token_rows(shapes, tied=tied).items():
        changes[f"{path}.weight"] = Replaced(tensors[f"{PREFIX}{path}.{TokenRows.KEY}"], tuple(ids))
    head, embedding = f"{HEAD}.weight", changes.get(f"{EMBEDDING}.weight")
    if tied and head not in changes and isinstance(embedding, Replaced) and embedding.ids is not None:
        changes[head] = embedding
    return changes


def merged_weight(name: str, weight: Tensor, change: Change | None, dtype: torch.dtype) -> Tensor:
    """A fresh `weight` with what is done to it, if anything is, in `dtype`. `name` stands for it in errors.

    Raises RunError when a value doesn't fit into `dtype` or isn't finite.
    """
    full = dequantized(weight)
    if change is not None:
        full = change.applied(full)
    merged = full.to(dtype, copy=True).contiguous()
    if not torch.isfinite(merged).all():
        if dtype == torch.float16 and torch.isfinite(full).all():
            raise RunError(f"{name} has values too large for float16: choose bfloat16 or float32")
        raise RunError(f"{name} has values that aren't finite: the base or the merge is broken")
    return merged
