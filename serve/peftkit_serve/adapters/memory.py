"""Memory of LoRA weights: one flat buffer that all adapters on the device share, each at its own rank.

A layer of an adapter is one contiguous extent, placed in the first hole that is long enough, in units of 64 KiB:

    buffer   | slot 0, layer 0 | slot 0, layer 1 | slot 2, layer 0 |  free  | slot 2, layer 1 |  free …
    extent   | A q | A k | … | A down | B q | B k | … | B down |

with A as (r, in) and B transposed as (r, out), rows contiguous. Kernels find them through tables of offset, rank and
scale by projection and slot; rank 0 is a projection that the slot's adapter leaves alone.
"""

import bisect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peftkit.errors import AdapterError, UnsupportedError
from peftkit.methods.lora import PREFIX, LoraSite
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec

UNIT_BYTES = 64 * 1024
"""Extents are whole units."""

_ALIGN_BYTES = 64  # every matrix starts on a cache line
_SITE = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(re.escape(name) for name in PROJECTIONS)})")
_GROUPS = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))  # q k v, o, gate up, down: each reads one input


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of an adapter as it lies in an extent; the tuples are by projection, offsets in elements."""

    weights: Tensor
    offset_a: tuple[int, ...]
    offset_b: tuple[int, ...]
    rank: tuple[int, ...]
    scale: tuple[float, ...]

    @property
    def num_units(self) -> int:
        """Length of its extent."""
        return -(-self.weights.nbytes // UNIT_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLora:
    """A LoRA on the host, ready to be copied into `LoraMemory`."""

    layers: tuple[PackedLayer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in `LoraMemory`."""
        return UNIT_BYTES * sum(layer.num_units for layer in self.layers)


class _Update(NamedTuple):
    """LoRA of one linear: A (r, in), B transposed (r, out), scale."""

    a: Tensor
    b: Tensor
    scale: float


class LoraTables(NamedTuple):
    """Where kernels find each (projection, slot) of one layer; the argument order of `grouped_lora`."""

    offset_a_PS: Tensor
    """int64, in elements of the buffer."""
    offset_b_PS: Tensor
    """int64."""
    rank_PS: Tensor
    """int32; 0 where there is nothing to apply."""
    scale_PS: Tensor
    """float32."""


def pack_lora(
    tensors: Mapping[str, Tensor],
    sites: Mapping[str, LoraSite],
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
) -> PackedLora:
    """Lays a LoRA's tensors out as `LoraMemory` holds them.

    tensors: PEFT keys → lora_A (r, in) and lora_B (out, r). sites: module path → rank and scale. dtype: that of the
    memory. Raises UnsupportedError that names a module which isn't one of the layers' linear projections or a tensor
    which belongs to none, AdapterError for a tensor that is missing or of the wrong shape.
    """
    by_layer: list[dict[int, _Update]] = [{} for _ in range(spec.num_layers)]
    left = set(tensors)
    for path, site in sites.items():
        found = _SITE.fullmatch(path)
        if found is None or int(found[1]) >= spec.num_layers:
            raise UnsupportedError(f"LoRA on {path} can't be served: {', '.join(PROJECTIONS)} can")
        projection = PROJECTIONS.index(found[2])
        out_features, in_features = spec.projection_shapes[projection]
        a = _tensor(tensors, f"{PREFIX}{path}.lora_A.weight", (site.r, in_features))
        b = _tensor(tensors, f"{PREFIX}{path}.lora_B.weight", (out_features, site.r))
        by_layer[int(found[1])][projection] = _Update(a, b.T, site.scale)
        left -= {f"{PREFIX}{path}.lora_A.weight", f"{PREFIX}{path}.lora_B.weight"}
    if left:
        raise UnsupportedError(f"tensor {min(left)} can't be served: it belongs to no LoRA on a linear projection")
    return PackedLora(tuple(_pack_layer(layer, dtype) for layer in by_layer))


class LoraMemory:
    """The buffer and its tables. Used on the thread that steps."""

    def __init__(
        self, spec: ModelSpec, *, num_slots: int, budget_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        num_slots: adapters that can be resident at a time.
        budget_bytes: size of the buffer, rounded down to whole units.
        """
        self._num_units = budget_bytes // UNIT_BYTES
        self._unit = UNIT_BYTES // dtype.itemsize
        self.weights = torch.empty(self._num_units * self._unit, dtype=dtype, device=device)
        """All extents, flat."""
        sizes = (spec.num_layers, len(PROJECTIONS), num_slots)
        self._all = LoraTables(
            torch.zeros(sizes, dtype=torch.int64, device=device),
            torch.zeros(sizes, dtype=torch.int64, device=device),
            torch.zeros(sizes, dtype=torch.int32, device=device),
            torch.zeros(sizes, dtype=torch.float32, device=device),
        )
        self._tables = [LoraTables(*(table[layer] for table in self._all)) for layer in range(spec.num_layers)]
        self._grouped = [[LoraTables(*(t[group] for t in tables)) for group in _GROUPS] for tables in self._tables]
        self._resident: dict[int, PackedLora] = {}
        self._extents: list[tuple[int, int, int, int]] = []  # (first unit, units, slot, layer), ascending

    @property
    def capacity_bytes(self) -> int:
        """Size of the buffer."""
        return self._num_units * UNIT_BYTES

    def used_bytes(self) -> int:
        """Bytes that resident adapters take."""
        return UNIT_BYTES * sum(extent[1] for extent in self._extents)

    def fits(self, nbytes: int) -> bool:
        """Whether an adapter of that many bytes can be loaded now. Holes never stand in the way: see `load`."""
        return nbytes <= self.capacity_bytes - self.used_bytes()

    def tables(self, layer: int) -> LoraTables:
        """A layer's tables over all of `PROJECTIONS`; views that follow every load."""
        return self._tables[layer]

    def grouped_tables(self, layer: int) -> list[LoraTables]:
        """A layer's tables for its four fused linears: q k v, o, gate up, down."""
        return self._grouped[layer]

    def load(self, slot: int, packed: PackedLora) -> None:
        """Copies an adapter into a free slot; the caller has seen that it fits.

        When no hole is long enough the resident extents are slid together first, which changes no result.
        """
        assert slot not in self._resident, f"slot {slot} is taken"
        assert self.fits(packed.nbytes), f"{packed.nbytes} bytes wanted, {self.used_bytes()} are used"
        try:
            for index, layer in enumerate(packed.layers):
                if layer.num_units:
                    start = self._place(layer.num_units)
                    self._weights_at(start, layer.weights.numel()).copy_(layer.weights)
                    bisect.insort(self._extents, (start, layer.num_units, slot, index))
            self._resident[slot] = packed
            self._write_tables(slot)
        except BaseException:
            self._forget(slot)
            raise

    def free(self, slot: int) -> None:
        """Forgets a slot's adapter."""
        assert slot in self._resident, f"slot {slot} is free already"
        self._forget(slot)

    def check_integrity(self) -> None:
        """Asserts that extents lie apart inside the buffer, and that they and the tables are the resident adapters'."""
        end = 0
        for start, units, slot, layer in self._extents:
            assert start >= end, f"extents overlap at unit {start}"
            assert units == self._resident[slot].layers[layer].num_units, f"slot {slot}, layer {layer}: {units} units"
            end = start + units
        assert end <= self._num_units, "an extent ends behind the buffer"
        wanted = {
            (s, i) for s, packed in self._resident.items() for i, one in enumerate(packed.layers) if one.num_units
        }
        assert {extent[2:] for extent in self._extents} == wanted, "extents and resident adapters differ"
        ranks = torch.zeros_like(self._all.rank_PS, device="cpu")
        for slot, packed in self._resident.items():
            ranks[:, :, slot] = torch.tensor([layer.rank for layer in packed.layers])
        assert torch.equal(ranks, self._all.rank_PS.cpu()), "the rank table differs from the resident adapters"

    def _forget(self, slot: int) -> None:
        self._resident.pop(slot, None)
        self._extents = [extent for extent in self._extents if extent[2] != slot]
        self._all.rank_PS[:, :, slot] = 0

    def _weights_at(self, start: int, num_elements: int) -> Tensor:
        return self.weights[start * self._unit :][:num_elements]

    def _place(self, units: int) -> int:
        """First unit of the first hole that is long enough."""
        end = 0
        for start, length, _, _ in self._extents:
            if start - end >= units:
                return end
            end = start + length
        if end + units > self._num_units:
            end = self._slide_together()
        return end

    def _slide_together(self) -> int:
        """Moves every extent to the front, without holes between; returns the first free unit."""
        end = 0
        for index, (start, units, slot, layer) in enumerate(self._extents):
            if start != end:
                moved = self._weights_at(start, units * self._unit).clone()  # where it comes from may overlap
                self._weights_at(end, units * self._unit).copy_(moved)
                self._extents[index] = (end, units, slot, layer)
            end += units
        for slot in self._resident:
            self._write_tables(slot)
        return end

    def _write_tables(self, slot: int) -> None:
        layers = self._resident[slot].layers
        starts = {extent[3]: extent[0] * self._unit for extent in self._extents if extent[2] == slot}
        rows = (
            [[starts.get(i, 0) + offset for offset in layer.offset_a] for i, layer in enumerate(layers)],
            [[starts.get(i, 0) + offset for offset in layer.offset_b] for i, layer in enumerate(layers)],
            [layer.rank for layer in layers],
            [layer.scale for layer in layers],
        )
        for table, values in zip(self._all, rows, strict=True):
            table[:, :, slot] = torch.tensor(values, dtype=table.dtype)


def _tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    if name not in tensors:
        raise AdapterError(f"tensor {name} is missing")
    if tuple(tensors[name].shape) != shape:
        raise AdapterError(f"tensor {name} has shape {list(tensors[name].shape)}, the base needs {list(shape)}")
    return tensors[name]


def _pack_layer(layer: Mapping[int, _Update], dtype: torch.dtype) -> PackedLayer:
    """layer: projection → its update."""
    align = _ALIGN_BYTES // dtype.itemsize
    offset_a, offset_b = [0] * len(PROJECTIONS), [0] * len(PROJECTIONS)
    matrices = [(offset_a, p, layer[p].a) for p in sorted(layer)] + [(offset_b, p, layer[p].b) for p in sorted(layer)]
    end = 0
    for offsets, projection, matrix in matrices:
        offsets[projection] = end
        end += -(-matrix.numel() // align) * align
    weights = torch.zeros(end, dtype=dtype)
    for offsets, projection, matrix in matrices:
        weights[offsets[projection] :][: matrix.numel()].view(matrix.shape).copy_(matrix)
    rank = tuple(layer[p].a.shape[0] if p in layer else 0 for p in range(len(PROJECTIONS)))
    scale = tuple(layer[p].scale if p in layer else 0.0 for p in range(len(PROJECTIONS)))
    return PackedLayer(weights, tuple(offset_a), tuple(offset_b), rank, scale)
