"""Memory of adapter weights: one flat buffer that all adapters on the device share, each at its own size.

A layer of an adapter is one contiguous extent, placed in the first hole that is long enough, in units of 64 KiB:

    buffer   | slot 0, layer 0 | slot 0, layer 1 | slot 2, layer 0 |  free  | slot 2, layer 1 |  free …

What lies in an extent says `packing.py`. Kernels find it through tables by layer, projection or sub-layer, and slot;
rank or width 0 is what the slot's adapter leaves alone.

On a GPU adapters come on a stream of their own, beside the steps. Two events keep the two apart, and the host waits for
neither: a load begins behind the steps that were started before the last place was freed, and the first step that
reads a slot begins behind its load.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peftkit_serve.adapters.packing import SUB_LAYERS, UNIT_BYTES, PackedAdapter, PackedLayer
from peftkit_serve.batch import Extras
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec

_GROUPS = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))  # q k v, o, gate up, down: each reads one input


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
    offset_c_PS: Tensor
    """int64; -1 where DoRA scales nothing."""


class BottleneckTables(NamedTuple):
    """Where kernels find each slot of one sub-layer; the argument order of `grouped_bottleneck`."""

    offset_S: Tensor
    """int64, in elements of the buffer."""
    width_S: Tensor
    """int32; 0 where there is nothing to apply."""
    scale_S: Tensor
    """float32."""
    form_S3: Tensor
    """int32: input, non-linearity, layer norm."""


class Rows(NamedTuple):
    """Rows of an embedding that a slot has in the place of the base's."""

    weight_YH: Tensor
    token_Y: Tensor | None
    """int64: the tokens that they are for; None where they are the whole vocabulary's."""


class Ends(NamedTuple):
    """What a slot has at the ends of the decoder, beside a LoRA of the output embedding; views of the buffer."""

    embedding_rows: Rows | None
    head_rows: Rows | None
    embedding_lora: tuple[Tensor, Tensor, float] | None
    """A transposed (V, r), B (H, r), scale."""


class AdapterMemory:
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
        self._spec = spec
        num_layers = spec.num_layers + 1  # the two ends of the decoder are one more
        num_slots = -(-num_slots // 4) * 4  # every layer's part of a table is aligned alike, and kernels compiled once
        lora, bottleneck = (num_layers, len(PROJECTIONS), num_slots), (num_layers, len(SUB_LAYERS), num_slots)

        def table(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._lora = LoraTables(
            table(lora, torch.int64),
            table(lora, torch.int64),
            table(lora, torch.int32),
            table(lora, torch.float32),
            table(lora, torch.int64),
        )
        self._bottleneck = BottleneckTables(
            table(bottleneck, torch.int64),
            table(bottleneck, torch.int32),
            table(bottleneck, torch.float32),
            table((*bottleneck, 3), torch.int32),
        )
        layers = range(num_layers)
        self._tables = [LoraTables(*(table[layer] for table in self._lora)) for layer in layers]
        self._grouped = [[LoraTables(*(t[group] for t in tables)) for group in _GROUPS] for tables in self._tables]
        self._sub_layers = [
            [BottleneckTables(*(table[layer, place] for table in self._bottleneck)) for place in range(len(SUB_LAYERS))]
            for layer in layers
        ]
        self._resident: dict[int, PackedAdapter] = {}
        self._used_bytes = 0
        self._extras, self._extras_by_slot = _joined(()), dict[int, Extras]()
        self._ends: dict[int, Ends] = {}
        self._places: dict[int, dict[int, int]] = {}  # slot → layer → first unit of its extent
        self._holes = self._free_holes()  # (first unit, units), ascending, none beside another
        self._loading = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrivals: dict[int, torch.cuda.Event] = {}  # of slots that no step has waited for
        self._vacated: torch.cuda.Event | None = None  # behind the last step that may read what was freed

    @property
    def capacity_bytes(self) -> int:
        """Size of the buffer."""
        return self._num_units * UNIT_BYTES

    def used_bytes(self) -> int:
        """Bytes that resident adapters take; other threads read it too."""
        return self._used_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether an adapter of that many bytes can be loaded now. Holes never stand in the way: see `load`."""
        return nbytes <= self.capacity_bytes - self.used_bytes()

    def tables(self, layer: int) -> LoraTables:
        """A layer's LoRA tables over all of `PROJECTIONS`; views that follow every load."""
        return self._tables[layer]

    def grouped_tables(self, layer: int) -> list[LoraTables]:
        """A layer's LoRA tables for its four fused linears: q k v, o, gate up, down."""
        return self._grouped[layer]

    def bottleneck_tables(self, layer: int) -> list[BottleneckTables]:
        """A layer's tables for attention and feed-forward."""
        return self._sub_layers[layer]

    @property
    def extras(self) -> Extras:
        """What a resident adapter has."""
        return self._extras

    def extras_of(self, slots: Iterable[int]) -> Extras:
        """What the adapters in some slots have; -1 is none."""
        if not any(self._extras):
            return self._extras
        return _joined(self._extras_by_slot[slot] for slot in set(slots) if slot >= 0)

    @property
    def ends(self) -> Mapping[int, Ends]:
        """What slots have at the ends of the decoder; only those that have something."""
        return self._ends

    def head_tables(self) -> LoraTables:
        """LoRA tables of the output embedding."""
        return LoraTables(*(table[:1] for table in self._tables[-1]))

    def load(self, slot: int, packed: PackedAdapter) -> None:
        """Copies an adapter into a free slot; the caller has seen that it fits.

        Out of pinned memory the copy is only queued: `wait_for` comes before a step that reads the slot. When no hole
        is long enough the resident extents are slid together first, which changes no result.
        """
        assert slot not in self._resident, f"slot {slot} is taken"
        assert self.fits(packed.nbytes), f"{packed.nbytes} bytes wanted, {self.used_bytes()} are used"
        try:
            self._settle(slot, packed)
            self._resident[slot] = packed
            self._used_bytes += packed.nbytes
            if self._loading is not None and self._vacated is not None:
                self._loading.wait_event(self._vacated)
            with nullcontext() if self._loading is None else torch.cuda.stream(self._loading):
                self._copy_in(slot, packed)
            self._extras_by_slot[slot] = _extras_of(packed)
            self._extras = _joined(self._extras_by_slot.values())
        except BaseException:
            self._forget(slot)
            raise

    def wait_for(self, slots: Iterable[int]) -> None:
        """What is started next begins behind the loads of these slots; the host goes on. -1 is none."""
        if self._arrivals:
            for slot in set(slots) & set(self._arrivals):
                torch.cuda.current_stream(self.weights.device).wait_event(self._arrivals.pop(slot))

    def free(self, slot: int) -> None:
        """Forgets a slot's adapter."""
        assert slot in self._resident, f"slot {slot} is free already"
        self._forget(slot)

    def check_integrity(self) -> None:
        """Asserts that extents lie apart inside the buffer, and that they and the tables are the resident adapters'."""
        self.wait_for(list(self._arrivals))
        end, in_hole = 0, False
        taken = [(start, units, False) for start, units, *_ in self._extents()]
        for start, units, is_hole in sorted(taken + [(*hole, True) for hole in self._holes]):
            assert start == end, f"what begins at unit {start} doesn't follow what ends at {end}"
            assert not (in_hole and is_hole), f"two holes meet at unit {start}"
            end, in_hole = start + units, is_hole
        assert end == self._num_units, "extents and holes are not the buffer"
        wanted = {
            (s, i) for s, packed in self._resident.items() for i, one in enumerate(packed.layers) if one.num_units
        }
        assert {extent[2:] for extent in self._extents()} == wanted, "extents and resident adapters differ"
        ranks, widths = torch.zeros_like(self._lora.rank_PS), torch.zeros_like(self._bottleneck.width_S)
        for slot, packed in self._resident.items():
            ranks[:, :, slot] = torch.from_numpy(packed.columns.lora[2])
            widths[:, :, slot] = torch.from_numpy(packed.columns.bottleneck[1])
        assert torch.equal(ranks, self._lora.rank_PS), "the rank table differs from the resident adapters"
        assert torch.equal(widths, self._bottleneck.width_S), "the width table differs from the resident adapters"
        assert self._extras_by_slot == {slot: _extras_of(packed) for slot, packed in self._resident.items()}
        assert self._used_bytes == sum(packed.nbytes for packed in self._resident.values())
        assert set(self._ends) == {slot for slot, packed in self._resident.items() if packed.has_ends}

    def _forget(self, slot: int) -> None:
        self.wait_for((slot,))
        packed, places = self._resident.pop(slot, None), self._places.pop(slot, {})
        if packed is not None:
            self._used_bytes -= packed.nbytes
            freed = [(start, packed.layers[layer].num_units) for layer, start in places.items()]
            self._holes = _merged([*self._holes, *freed])
        elif places:  # of a load that was interrupted
            self._holes = self._free_holes()
        self._ends.pop(slot, None)
        self._extras_by_slot.pop(slot, None)
        self._extras = _joined(self._extras_by_slot.values())
        self._lora.rank_PS[:, :, slot] = 0
        self._bottleneck.width_S[:, :, slot] = 0
        self._mark_vacated()

    def _mark_vacated(self) -> None:
        """The next load begins behind what has been started until now."""
        if self._loading is not None:
            self._vacated = _mark(torch.cuda.current_stream(self.weights.device))

    def _copy_in(self, slot: int, packed: PackedAdapter) -> None:
        """Queues the copy of a slot's extents, whose places are known, and of its tables."""
        try:
            for index, start in self._places[slot].items():
                weights = packed.layers[index].weights
                self._weights_at(start, weights.numel()).copy_(weights, non_blocking=True)
            self._write_tables(slot)
        finally:  # one that fails midway may have queued something too
            if self._loading is not None:
                self._arrivals[slot] = _mark(self._loading)

    def _weights_at(self, start: int, num_elements: int) -> Tensor:
        return self.weights[start * self._unit :][:num_elements]

    def _extents(self) -> list[tuple[int, int, int, int]]:
        """(first unit, units, slot, layer) of all that is resident, ascending."""
        return sorted(
            (start, self._resident[slot].layers[layer].num_units, slot, layer)
            for slot, places in self._places.items()
            for layer, start in places.items()
        )

    def _settle(self, slot: int, packed: PackedAdapter) -> None:
        """Finds an extent for each layer in one pass: the first hole that is long enough, from the layer before on."""
        wanted = [(layer.num_units, index) for index, layer in enumerate(packed.layers) if layer.num_units]
        found, holes = _placed(wanted, self._holes)
        if len(found) < len(wanted):
            self._slide_together()
            found, holes = _placed(wanted, self._holes)
        self._places[slot], self._holes = found, holes

    def _slide_together(self) -> None:
        """Moves every extent to the front, without holes between."""
        self.wait_for(list(self._arrivals))
        end = 0
        try:
            for start, units, slot, layer in self._extents():
                if start != end:
                    self._move(start, end, units)
                    self._places[slot][layer] = end
                end += units
        finally:  # where one can't be moved, those before it have been
            self._holes = self._free_holes()
            for slot in self._resident:
                self._write_tables(slot)
            self._mark_vacated()

    def _move(self, start: int, end: int, units: int) -> None:
        """Copies an extent to the front, in pieces that don't overlap where they come from."""
        for first in range(0, units, start - end):
            length = min(start - end, units - first) * self._unit
            self._weights_at(end + first, length).copy_(self._weights_at(start + first, length))

    def _free_holes(self) -> list[tuple[int, int]]:
        """What no extent takes."""
        holes: list[tuple[int, int]] = []
        end = 0
        for start, units, *_ in [*self._extents(), (self._num_units, 0)]:
            if start > end:
                holes.append((end, start - end))
            end = start + units
        return holes

    def _write_tables(self, slot: int) -> None:
        """Where a slot's layers are; what isn't there has rank or width 0, and any place."""
        packed, places = self._resident[slot], self._places[slot]
        start_L = np.array([places.get(index, 0) * self._unit for index in range(len(packed.layers))])
        columns = packed.columns.moved(start_L)
        for table, column in zip(chain(self._lora, self._bottleneck), chain(*columns), strict=True):
            values = torch.from_numpy(column).to(table.dtype)
            if self._loading is not None:
                values = values.pin_memory()
            table[:, :, slot].copy_(values, non_blocking=True)
        ends = self._views_of_ends(packed.layers[-1], int(start_L[-1]))
        if ends is not None:
            self._ends[slot] = ends

    def _views_of_ends(self, layer: PackedLayer, start: int) -> Ends | None:
        vocab, hidden = self._spec.vocab_size, self._spec.hidden_size

        def matrix(offset: int, *shape: int) -> Tensor:
            return self.weights[start + offset :][: math.prod(shape)].view(shape)

        head, embedding = (
            Rows(matrix(span.offset, span.num_rows, hidden), self._moved(span.token_ids)) if span.num_rows else None
            for span in layer.rows
        )
        span = layer.lora[1]
        lora = matrix(span.offset_a, vocab, span.rank), matrix(span.offset_b, hidden, span.rank), span.scale
        ends = Ends(embedding, head, lora if span.rank else None)
        return None if ends == (None, None, None) else ends

    def _moved(self, token_ids: Tensor | None) -> Tensor | None:
        if token_ids is None:
            return None
        moved = token_ids.to(self.weights.device, non_blocking=True)
        if self._loading is not None:  # made beside the steps, read by them
            moved.record_stream(torch.cuda.default_stream(self.weights.device))
        return moved


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Done when all that the stream has been given until now is."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _placed(
    wanted: Iterable[tuple[int, int]], holes: Iterable[tuple[int, int]]
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Extents (units, layer), one behind the other, in the first holes that are long enough: layer → first unit, as far
    as there was room, and the holes that are left."""
    places, left, waiting = dict[int, int](), list[tuple[int, int]](), deque(wanted)
    for start, length in holes:
        while waiting and waiting[0][0] <= length:
            units, layer = waiting.popleft()
            places[layer] = start
            start, length = start + units, length - units
        if length:
            left.append((start, length))
    return places, left


def _merged(holes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending, those that meet as one."""
    merged: list[tuple[int, int]] = []
    for start, length in sorted(holes):
        if merged and sum(merged[-1]) == start:
            start, length = merged[-1][0], merged.pop()[1] + length
        merged.append((start, length))
    return merged


def _extras_of(packed: PackedAdapter) -> Extras:
    return Extras(packed.has_feed_forward_lora, packed.has_bottlenecks, packed.has_head_lora, packed.has_ends)


def _joined(extras: Iterable[Extras]) -> Extras:
    return Extras(*map(any, zip(Extras(False, False, False, False), *extras, strict=True)))
