"""What the decoder reads of a step: one packed row for each new token, chunk after chunk in the plan's order."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from peftkit_kernels import Segments


class Extras(NamedTuple):
    """What adapters have beside LoRA on the linear layers of attention: each costs a step launches of its own."""

    feed_forward: bool
    """LoRA of gate, up or down."""
    bottlenecks: bool
    head_lora: bool
    """LoRA of the output embedding."""
    ends: bool
    """Other parts of the decoder's two ends."""


class Span(NamedTuple):
    """A segment as the host knows it: entries of its table's `row_X`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What the decoder reads beside the weights and the pages; all on the decoder's device."""

    token_T: Tensor
    """int64."""
    position_T: Tensor
    """int64."""
    cell_T: Tensor
    """int64: where a token's keys and values go, page · Z + offset."""
    cu_seqlens_N1: Tensor
    """int32: chunk n has the rows from its n-th to its n + 1-st entry."""
    context_N: Tensor
    """int32: positions of a request, the new ones included."""
    page_NM: Tensor
    """int32: block tables; what stands behind a shorter one is read by nothing."""
    num_virtual_N: Tensor
    """int32."""
    segments: Segments | None
    """Rows by adapter slot; None when all rows are the bare base's."""
    sample_row_X: Tensor
    """int64: rows whose logits are asked for, chunk after chunk: those that have a target, then the last row of a chunk
    that draws a token; in a padded step the last row of each chunk."""
    sample_segments: Segments | None
    """These rows, counted in their own order, by adapter slot; None when all are the bare base's."""
    spans: tuple[Span, ...] = ()
    """Of `segments`, for the decoder's ends, which are looked up on the host; a captured step has none."""
    sample_spans: tuple[Span, ...] = ()
    """Of `sample_segments`, likewise."""
    extras: Extras | None = None
    """Which of them the step's adapters have; None stands for whatever a resident adapter has."""
