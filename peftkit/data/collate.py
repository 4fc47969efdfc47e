"""Samples → one right-padded batch. Padding is known by position alone, never by a token id: pad = eos is common.

B rows, T tokens of the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peftkit.data.dataset import Sample

IGNORED = -100
"""Label of a token that is no target."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch; all tensors int64."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    """1 at a row's own tokens, 0 at padding."""
    position_ids_BT: Tensor
    """0, 1, 2, … over a row's own tokens."""
    labels_BT: Tensor
    """The token itself where it is trained, IGNORED elsewhere; a model predicts it from the position before."""
    num_tokens: int
    """Tokens without padding."""
    num_target_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(
            self.input_ids_BT.to(device, non_blocking=True),
            self.attention_mask_BT.to(device, non_blocking=True),
            self.position_ids_BT.to(device, non_blocking=True),
            self.labels_BT.to(device, non_blocking=True),
            self.num_tokens,
            self.num_target_tokens,
        )


def collate(samples: Sequence[Sample]) -> Batch:
    """Pads `samples` on the right to the longest of them, with id 0."""
    assert samples, "a batch has at least one row"
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    T = int(lengths.max())
    input_ids = torch.zeros(len(samples), T, dtype=torch.long)
    labels = torch.full((len(samples), T), IGNORED, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample.ids).long()
        trained = torch.from_numpy(sample.trained)
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = torch.where(trained, ids, IGNORED)
    mask = (torch.arange(T) < lengths[:, None]).long()
    return Batch(
        input_ids_BT=input_ids,
        attention_mask_BT=mask,
        position_ids_BT=(mask.cumsum(-1) - 1).clamp(min=0),
        labels_BT=labels,
        num_tokens=int(lengths.sum()),
        num_target_tokens=int((labels != IGNORED).sum()),
    )
