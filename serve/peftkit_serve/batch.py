"""A step's plan as tensors: one packed row for each new token, chunk after chunk in the plan's order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from peftkit_kernels import Segments, sort_by_slot
from peftkit_serve.plan import Chunk


class Extras(NamedTuple):
    """What adapters have beside LoRA on the linear layers of the decoder: each costs a step launches of its own."""

    bottlenecks: bool
    head_lora: bool
    """LoRA of the output embedding."""
    ends: bool
    """Other parts of the decoder's two ends."""


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
    """int32: block tables; behind a shorter one stands 0, which nothing reads."""
    num_virtual_N: Tensor
    """int32."""
    segments: Segments | None
    """Rows by adapter slot; None when all rows are the bare base's."""
    sample_row_X: Tensor
    """int64: rows whose logits are asked for, chunk after chunk: those that have a target, then the last row of a chunk
    that draws a token."""
    sample_segments: Segments | None
    """These rows, counted in their own order, by adapter slot; None when all are the bare base's."""
    extras: Extras | None = None
    """Which of them the step's adapters have; None stands for whatever a resident adapter has."""


def build_batch(chunks: Sequence[Chunk], *, page_tokens: int, device: torch.device) -> Batch:
    """Lays the chunks of a step out for the decoder. There is at least one chunk, and each has a token at least."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    assert lengths and min(lengths) >= 1, "a step needs tokens"
    ends = [chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)]
    tables = [chunk.block_table[: -(-end // page_tokens)] for chunk, end in zip(chunks, ends, strict=True)]
    assert all(len(table) * page_tokens >= end for table, end in zip(tables, ends, strict=True)), "a table is too short"
    starts = [0, *accumulate(lengths)]
    num_pages = max(len(table) for table in tables)
    page_NM = torch.tensor([(*table, *(0,) * (num_pages - len(table))) for table in tables], dtype=torch.int32)
    positions = chain.from_iterable(range(chunk.start, end) for chunk, end in zip(chunks, ends, strict=True))
    position_T = torch.tensor(list(positions))
    n_T = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths))
    cell_T = page_NM[n_T, position_T // page_tokens].long() * page_tokens + position_T % page_tokens
    slots = torch.tensor([chunk.slot for chunk in chunks])
    asked = [_asked_rows(chunk, start) for chunk, start in zip(chunks, starts, strict=False)]
    sample_slots = torch.tensor(
        [chunk.slot for chunk, rows in zip(chunks, asked, strict=True) for _ in rows], dtype=torch.int64
    )
    return Batch(
        token_T=torch.tensor([*chain.from_iterable(chunk.token_ids for chunk in chunks)]).to(device),
        position_T=position_T.to(device),
        cell_T=cell_T.to(device),
        cu_seqlens_N1=torch.tensor(starts, dtype=torch.int32).to(device),
        context_N=torch.tensor(ends, dtype=torch.int32).to(device),
        page_NM=page_NM.to(device),
        num_virtual_N=torch.tensor([chunk.num_virtual for chunk in chunks], dtype=torch.int32).to(device),
        segments=_segments(slots[n_T], device),
        sample_row_X=torch.tensor([*chain.from_iterable(asked)], dtype=torch.int64).to(device),
        sample_segments=_segments(sample_slots, device),
    )


def _asked_rows(chunk: Chunk, start: int) -> list[int]:
    """Rows of a chunk, which begins at row `start`, whose logits are asked for."""
    last = [] if chunk.sample is None else [start + len(chunk.token_ids) - 1]
    return [*range(start, start + len(chunk.targets)), *last]


def _segments(slot_T: Tensor, device: torch.device) -> Segments | None:
    return sort_by_slot(slot_T).to(device) if (slot_T >= 0).any() else None
