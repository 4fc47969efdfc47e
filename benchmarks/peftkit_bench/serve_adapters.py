"""Random adapters of every kind for `peftkit bench serve`, each known by its number: in host memory or as a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from peftkit.artifact import write_adapter
from peftkit.methods import BottleneckConfig, LoraConfig, PrefixTuningConfig, PromptTuningConfig
from peftkit.methods.lora import PREFIX, LoraSite
from peftkit_serve.adapters.loader import LoadedAdapter
from peftkit_serve.adapters.packing import PackedAdapter, pack_bottleneck, pack_lora
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec

ATTENTION = PROJECTIONS[:4]
_SPREAD = 0.01
_VIRTUAL = 20
"""Not a whole number of pages, so that requests copy the last one."""
_BOTTLENECK = 64
_BLOCK_BYTES = 1 << 30
_ALIGN = 64


@dataclass(frozen=True)
class Family:
    """Adapters of one making. An adapter's number is its seed, so no two are alike."""

    name: str
    kind: Literal["lora", "bottleneck", "prefix", "prompt"] = "lora"
    ranks: tuple[int, ...] = ()
    """Of LoRAs, in turn."""
    projections: tuple[str, ...] = PROJECTIONS

    def rank(self, number: int) -> int:
        """A LoRA's rank."""
        return self.ranks[number % len(self.ranks)]


RANK_8 = Family("r8", ranks=(8,), projections=ATTENTION)
MIXED = Family("mixed", ranks=(64, 32, 16, 8), projections=ATTENTION)
"""The two of S-LoRA's replay."""
RANK_16 = Family("r16", ranks=(16,))
KINDS = (RANK_16, Family("prefix", "prefix"), Family("prompt", "prompt"), Family("bottleneck", "bottleneck"))


class HostMemory:
    """Host memory for weights; on a GPU pinned, and in large blocks, because each pinned one costs milliseconds."""

    def __init__(self, dtype: torch.dtype, *, pinned: bool) -> None:
        self._dtype, self._pinned = dtype, pinned
        self._block = torch.empty(0, dtype=dtype)
        self._used = 0

    def take(self, num_elements: int) -> Tensor:
        """A flat tensor of its own; its block lives as long as any of its tensors."""
        if not self._pinned:
            return torch.empty(num_elements, dtype=self._dtype)
        if self._used + num_elements > self._block.numel():
            size = max(num_elements, _BLOCK_BYTES // self._dtype.itemsize)
            self._block, self._used = torch.empty(size, dtype=self._dtype, pin_memory=True), 0
        piece = self._block[self._used :][:num_elements]
        self._used += -(-num_elements // _ALIGN) * _ALIGN
        return piece


class AdapterMaker:
    """Makes adapters of a base; their weights are drawn on its device."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._memory = HostMemory(dtype, pinned=device.type == "cuda")
        self._templates: dict[tuple[int, tuple[str, ...]], PackedAdapter] = {}

    def make(self, family: Family, number: int) -> LoadedAdapter:
        """An adapter in host memory, as if it had been loaded from a folder."""
        uid = f"bench-{family.name}-{number}"
        if family.kind == "lora":
            config = LoraConfig(r=family.rank(number), alpha=2.0 * family.rank(number))
            return LoadedAdapter(uid, (config,), {}, weights=self._filled(self._lora(family, number), number))
        if family.kind == "bottleneck":
            config = self._bottleneck_config
            return LoadedAdapter(uid, (config,), {}, weights=self._filled(self._bottleneck, number))
        loaded = self._virtual(family, number, uid)
        return loaded.pinned() if self._device.type == "cuda" else loaded

    def lora_bytes(self, family: Family, number: int) -> tuple[int, int]:
        """Bytes of a LoRA's weights, and what it takes of adapter memory."""
        template = self._lora(family, number)
        return sum(layer.weights.nbytes for layer in template.layers), template.nbytes

    def write(self, family: Family, number: int, folder: Path) -> Path:
        """A LoRA as an HF PEFT folder."""
        draws = torch.Generator(self._device).manual_seed(number)
        tensors = {
            name: torch.empty(like.shape, dtype=self._dtype, device=self._device).normal_(0, _SPREAD, generator=draws)
            for name, like in self._sizes(family, number)[0].items()
        }
        rank = family.rank(number)
        return write_adapter(folder, LoraConfig(r=rank, alpha=2.0 * rank), tensors).path

    def _virtual(self, family: Family, number: int, uid: str) -> LoadedAdapter:
        spec, draws = self._spec, torch.Generator().manual_seed(number)
        if family.kind == "prompt":
            config = PromptTuningConfig(num_virtual_tokens=_VIRTUAL, init="random")
            embeddings_VH = _SPREAD * torch.randn(_VIRTUAL, spec.hidden_size, generator=draws)
            return LoadedAdapter(uid, (config,), {}, embeddings_VH=embeddings_VH)
        sizes = (_VIRTUAL, spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
        kv_VL2KD = _SPREAD * torch.randn(sizes, generator=draws)
        return LoadedAdapter(uid, (PrefixTuningConfig(num_virtual_tokens=_VIRTUAL),), {}, kv_VL2KD=kv_VL2KD)

    def _filled(self, template: PackedAdapter, number: int) -> PackedAdapter:
        lengths = [layer.weights.numel() for layer in template.layers]
        draws = torch.Generator(self._device).manual_seed(number)
        drawn = torch.empty(sum(lengths), dtype=self._dtype, device=self._device).normal_(0, _SPREAD, generator=draws)
        parts = self._memory.take(sum(lengths)).copy_(drawn).split(lengths)
        layers = (replace(layer, weights=part) for layer, part in zip(template.layers, parts, strict=True))
        return PackedAdapter(tuple(layers))

    def _lora(self, family: Family, number: int) -> PackedAdapter:
        key = family.rank(number), family.projections
        if key not in self._templates:
            tensors, sites = self._sizes(family, number)
            self._templates[key] = pack_lora(tensors, sites, self._spec, base_linear=_no_base, dtype=self._dtype)
        return self._templates[key]

    def _sizes(self, family: Family, number: int) -> tuple[Mapping[str, Tensor], Mapping[str, LoraSite]]:
        """Zeros of the shapes of a LoRA's tensors by PEFT key, and its sites."""
        spec, rank = self._spec, family.rank(number)
        tensors: dict[str, Tensor] = {}
        sites: dict[str, LoraSite] = {}
        for layer in range(spec.num_layers):
            for name, (out, inside) in zip(PROJECTIONS, spec.projection_shapes, strict=True):
                if name in family.projections:
                    path = f"model.layers.{layer}.{name}"
                    sites[path] = LoraSite(rank, 2.0, out, inside)
                    tensors[f"{PREFIX}{path}.lora_A.weight"] = torch.zeros(1).expand(rank, inside)
                    tensors[f"{PREFIX}{path}.lora_B.weight"] = torch.zeros(1).expand(out, rank)
        return tensors, sites

    @cached_property
    def _bottleneck_config(self) -> BottleneckConfig:
        size = min(_BOTTLENECK, self._spec.hidden_size // 2)
        return BottleneckConfig(bottleneck_size=size).resolved(self._spec.hidden_size)

    @cached_property
    def _bottleneck(self) -> PackedAdapter:
        shapes = self._bottleneck_config.expected_tensors(self._spec.num_layers, self._spec.hidden_size)
        zeros = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
        return pack_bottleneck(zeros, self._bottleneck_config, self._spec, dtype=self._dtype)


def mean_lora_bytes(family: Family, spec: ModelSpec, dtype: torch.dtype) -> float:
    """What a LoRA of a family takes of adapter memory, on average of its ranks, without what extents are rounded by."""
    shapes = zip(PROJECTIONS, spec.projection_shapes, strict=True)
    sides = sum(sum(shape) for name, shape in shapes if name in family.projections)
    return spec.num_layers * sides * dtype.itemsize * sum(family.ranks) / len(family.ranks)


def _no_base(path: str) -> tuple[Tensor, Tensor | None]:
    raise AssertionError(path)
