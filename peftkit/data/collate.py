"""Samples → one right-padded batch. Padding is known by position alone, never by a token id: pad = eos is common.

B rows, T tokens of the longest row, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from peftkit.data.encode import Sample
from peftkit.data.packing import PADDING

IGNORED = -100
"""Label of a token that is no target."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch; tensors are int64."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    """1 at a row's own tokens, 0 at padding."""
    position_ids_BT: Tensor
    """0, 1, 2, … over a sample's own tokens."""
    labels_BT: Tensor
    """The token itself where it is trained, IGNORED elsewhere; a model predicts it from the position before."""
    num_tokens: int
    """Tokens without padding."""
    num_target_tokens: int
    segments_BT: Tensor | None = None
    """Which of a packed row's samples each token belongs to; None where a row is one sample."""
    bounds_S: Tensor | None = None
    """Where each sample, or a row's padding, begins among the tokens of all rows, and their number; int32, on a GPU."""
    longest: int = 0
    """Tokens of the longest of them."""

    @property
    def num_positions(self) -> int:
        """Tokens with padding: what is computed."""
        return self.input_ids_BT.numel()

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; on a GPU with its bounds, which couldn't be found there without waiting."""
        if device.type != "cpu" and self.input_ids_BT.device.type == "cpu":
            bounds_S, longest = sequence_bounds(self.segments_BT, self.attention_mask_BT)
            return replace(self, bounds_S=bounds_S, longest=longest)._moved(device)
        return self._moved(device)

    def _moved(self, device: torch.device) -> "Batch":
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {name: v.to(device, non_blocking=True) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def sequence_bounds(segments_BT: Tensor | None, attention_mask_BT: Tensor) -> tuple[Tensor, int]:
    """Bounds int32 (S + 1,) of the samples in a batch's rows and of what padding follows them; the longest one's
    tokens."""
    kinds_BT = attention_mask_BT if segments_BT is None else segments_BT
    begins_BT = torch.ones_like(kinds_BT, dtype=torch.bool)
    begins_BT[:, 1:] = kinds_BT[:, 1:] != kinds_BT[:, :-1]
    begins = begins_BT.flatten().nonzero().squeeze(1)
    bounds_S = torch.cat([begins, begins.new_tensor([kinds_BT.numel()])]).to(torch.int32)
    return bounds_S, int(bounds_S.diff().max())


def collate(samples: Sequence[Sample]) -> Batch:
    """One sample a row, padded on the right to the longest of them, with id 0."""
    return _collate([[sample] for sample in samples])


def collate_packed(rows: Sequence[Sequence[Sample]]) -> Batch:
    """Each row's samples end to end, padded on the right to the longest row, with id 0."""
    return _collate(rows, packed=True)


def _collate(rows: Sequence[Sequence[Sample]], *, packed: bool = False) -> Batch:
    assert rows and all(rows), "a batch has at least one row, a row at least one sample"
    lengths = torch.tensor([sum(len(sample.ids) for sample in row) for row in rows])
    shape = (len(rows), int(lengths.max()))
    input_ids = torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORED, dtype=torch.long)
    segments = torch.full(shape, PADDING, dtype=torch.long)
    for index, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row):
            own = slice(start, start + len(sample.ids))
            ids = torch.from_numpy(sample.ids.astype(np.int64))
            input_ids[index, own] = ids
            labels[index, own] = torch.where(torch.from_numpy(sample.trained), ids, IGNORED)
            positions[index, own] = torch.arange(len(ids))
            segments[index, own] = segment
            start += len(ids)
        positions[index, start:] = 0 if packed else max(start - 1, 0)
    return Batch(
        input_ids_BT=input_ids,
        attention_mask_BT=(segments != PADDING).long(),
        position_ids_BT=positions,
        labels_BT=labels,
        num_tokens=int(lengths.sum()),
        num_target_tokens=int((labels != IGNORED).sum()),
        segments_BT=segments if packed else None,
    )
