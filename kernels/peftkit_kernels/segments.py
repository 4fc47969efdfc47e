"""The rows of a step sorted by adapter, in chunks: one table a step that every adapter operation reads."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RANK = 512
"""Largest rank of `grouped_lora`: on a GPU ranks are read there alone, and memory is laid out for this one."""


def max_width(hidden: int) -> int:
    """Largest width of `grouped_bottleneck` at a hidden size, for the same reason."""
    return max(-(-hidden // 64) * 64, MAX_RANK)


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of rows with one adapter slot each.

    Segment g holds the rows `row_X[start_G1[g] : start_G1[g + 1]]`, all of slot `slot_G[g]`:

        row_X     5  7 | 0  1  2 | 3  9          rows of the packed step; bare rows are not listed
        start_G1  0      2         5       7
        slot_G    0      1         1             a slot with more rows than a chunk has several segments
        row_slot  0  0 | 1  1  1 | 1  1          -1 for rows behind the last segment
    """

    row_X: Tensor
    """int64; ascending within a segment."""
    start_G1: Tensor
    """int32, from 0 to X."""
    slot_G: Tensor
    """int32, ascending."""
    row_slot_X: Tensor
    """int32: the slot of each entry of `row_X`, for programs that have a single row."""

    @classmethod
    def of(cls, row_X: Tensor, start_G1: Tensor, slot_G: Tensor) -> "Segments":
        """The table with `row_slot_X` as the others say."""
        row_slot_X = torch.full(row_X.shape, -1, dtype=torch.int32, device=row_X.device)
        slots = slot_G.repeat_interleave(start_G1.diff())
        row_slot_X[: len(slots)] = slots
        return cls(row_X, start_G1, slot_G, row_slot_X)

    def to(self, device: torch.device) -> "Segments":
        """The same table on another device."""
        return Segments(
            self.row_X.to(device), self.start_G1.to(device), self.slot_G.to(device), self.row_slot_X.to(device)
        )


def sort_by_slot(slot_T: Tensor, *, max_rows: int | None = None) -> Segments:
    """Sorts rows by adapter slot, stably; slot -1, the bare base, is left out.

    slot_T: integers on the CPU. max_rows: most rows of a segment; None sets no limit.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}: it must be at least 1, or None")
    adapted_X = (slot_T >= 0).nonzero()[:, 0]
    row_X = adapted_X[torch.argsort(slot_T[adapted_X], stable=True)]
    starts, slots = [0], []
    for slot, count in zip(*(part.tolist() for part in _runs(slot_T[row_X])), strict=True):
        end = starts[-1] + count
        while starts[-1] < end:
            starts.append(end if max_rows is None else min(end, starts[-1] + max_rows))
            slots.append(slot)
    return Segments.of(row_X, torch.tensor(starts, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32))


def _runs(slot_X: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values of a sorted tensor and how often each stands there."""
    slot_G, count_G = torch.unique_consecutive(slot_X, return_counts=True)
    return slot_G, count_G
