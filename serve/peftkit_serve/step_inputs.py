"""A step of any chunks as tensors: one packed row for each new token, chunk after chunk in the plan's order.

All of it is laid out in numpy, staged in one pinned buffer and goes to the device in one copy, for which nobody waits.
`MixedInputs` pads the same to places that never change, `DecodeInputs` has its own way for steps of single tokens.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_kernels import Segments
from peftkit_serve.batch import Batch, Span
from peftkit_serve.pages import PAGE_TOKENS
from peftkit_serve.plan import Chunk
from peftkit_serve.sampler import Draws, lay_out_draws

_ALIGN = 64  # bytes: kernels are compiled for aligned pointers


class Staged(NamedTuple):
    """A step's tensors on the device."""

    batch: Batch
    draws: Draws
    """One entry for each chunk that draws."""


class StepInputs:
    """Lays steps out. The tensors that it returns hold until it lays the next one out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._staged = torch.empty(0, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def lay_out(self, chunks: Sequence[Chunk], last_token_R: Tensor, sources: Sequence[int]) -> Staged:
        """Starts the copy of a step's tensors to the device.

        last_token_R: tokens of the step before, on the device. sources: for each chunk the row of its last token in
        them, -1 where it is known. There is at least one chunk, and each has a token at least.
        """
        fields = _lay_out(chunks, sources)
        at = self._copy(fields)
        if len(fields["late_row"]):
            at["token"].index_copy_(0, at["late_row"], last_token_R.index_select(0, at["late_source"]))
        segments, sample_segments = (
            Segments(at[f"{name}row"], at[f"{name}start"], at[f"{name}slot"], at[f"{name}row_slot"])
            if len(fields[f"{name}slot"])
            else None
            for name in ("segment_", "sample_segment_")
        )
        batch = Batch(
            token_T=at["token"],
            position_T=at["position"],
            cell_T=at["cell"],
            cu_seqlens_N1=at["cu_seqlens"],
            context_N=at["context"],
            page_NM=at["page"].view(len(chunks), -1),
            num_virtual_N=at["num_virtual"],
            segments=segments,
            sample_row_X=at["sample_row"],
            sample_segments=sample_segments,
            spans=spans_of(fields["segment_slot"], fields["segment_start"]),
            sample_spans=spans_of(fields["sample_segment_slot"], fields["sample_segment_start"]),
        )
        return Staged(batch, Draws(*(at[name] for name in Draws._fields)))

    def _copy(self, fields: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
        starts: dict[str, int] = {}
        num_bytes = 0
        for name, values in fields.items():
            starts[name] = num_bytes
            num_bytes += -(-values.nbytes // _ALIGN) * _ALIGN
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: it lies behind a step whose tokens have been seen
        if num_bytes > len(self._host):
            room = 1 << (num_bytes - 1).bit_length()
            self._host = torch.empty(room, dtype=torch.uint8, pin_memory=self._copied is not None)
            self._staged = torch.empty(room, dtype=torch.uint8, device=self._device)
        host = self._host.numpy()
        for name, values in fields.items():
            host[starts[name] :][: values.nbytes] = values.reshape(-1).view(np.uint8)
        self._staged[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return {
            name: self._staged[starts[name] :][: values.nbytes].view(_TORCH_DTYPES[values.dtype.char])
            for name, values in fields.items()
        }


_TORCH_DTYPES = {
    np.dtype(np.int64).char: torch.int64,
    np.dtype(np.int32).char: torch.int32,
    np.dtype(np.float32).char: torch.float32,
}


def spans_of(slot_G: NDArray[np.int32], start_G1: NDArray[np.int32]) -> tuple[Span, ...]:
    """A segment table's slots and the entries that are of each."""
    return tuple(map(Span, slot_G.tolist(), start_G1[:-1].tolist(), start_G1[1:].tolist()))


def _lay_out(chunks: Sequence[Chunk], sources: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Every tensor of the step, by name, as it is on the device."""
    rows = lay_out_rows(chunks)
    cu_N1, length_N, slot_N = rows.cu_N1, rows.length_N, rows.slot_N
    # rows whose logits are asked for: a chunk's first ones, that have targets, and its last one if it draws
    num_targets_N = np.array([len(chunk.targets) for chunk in chunks])
    asked_N = num_targets_N + np.array([chunk.sample is not None for chunk in chunks])
    asked_cu_N1 = np.concatenate(([0], asked_N.cumsum()))
    n_X = np.repeat(np.arange(len(chunks)), asked_N)
    within_X = np.arange(asked_cu_N1[-1]) - asked_cu_N1[n_X]
    sample_row_X = cu_N1[n_X] + np.where(within_X < num_targets_N[n_X], within_X, length_N[n_X] - 1)
    source_N = np.array(sources)
    late_N = np.flatnonzero(source_N >= 0)
    return {
        **rows.fields,
        "page": rows.page_NM,
        "sample_row": sample_row_X,
        "late_row": cu_N1[late_N + 1] - 1,
        "late_source": source_N[late_N],
        **lay_out_segments("segment_", slot_N, length_N, cu_N1[:-1]),
        **lay_out_segments("sample_segment_", slot_N, asked_N, asked_cu_N1[:-1]),
        **lay_out_draws([chunk.sample for chunk in chunks if chunk.sample is not None]),
    }


class Rows(NamedTuple):
    """A step's rows and requests."""

    cu_N1: NDArray[np.int64]
    length_N: NDArray[np.int64]
    slot_N: NDArray[np.int64]
    page_NM: NDArray[np.int32]
    fields: dict[str, NDArray[Any]]
    """What goes to the device as it is."""


def lay_out_rows(chunks: Sequence[Chunk]) -> Rows:
    """What doesn't depend on how rows are drawn."""
    length_N = np.array([len(chunk.token_ids) for chunk in chunks])
    assert len(chunks) and length_N.min() >= 1, "a step needs tokens"
    start_N = np.array([chunk.start for chunk in chunks])
    cu_N1 = np.concatenate(([0], length_N.cumsum()))
    num_tokens = int(cu_N1[-1])
    n_T = np.repeat(np.arange(len(chunks)), length_N)
    position_T = np.arange(num_tokens) - cu_N1[n_T] + start_N[n_T]
    page_NM = _block_tables(chunks, start_N + length_N)
    cell_T = page_NM[n_T, position_T // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + position_T % PAGE_TOKENS
    fields: dict[str, NDArray[Any]] = {
        "token": np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, num_tokens),
        "position": position_T,
        "cell": cell_T,
        "cu_seqlens": cu_N1.astype(np.int32),
        "context": (start_N + length_N).astype(np.int32),
        "num_virtual": np.array([chunk.num_virtual for chunk in chunks], np.int32),
    }
    return Rows(cu_N1, length_N, np.array([chunk.slot for chunk in chunks]), page_NM, fields)


def _block_tables(chunks: Sequence[Chunk], end_N: NDArray[np.int64]) -> NDArray[np.int32]:
    """Block tables as far as they are needed; behind a shorter one stands 0, which nothing reads."""
    count_N = -(-end_N // PAGE_TOKENS)
    assert all(len(chunk.block_table) >= count for chunk, count in zip(chunks, count_N, strict=True)), "too short"
    page_NM = np.zeros((len(chunks), count_N.max()), np.int32)
    tables = (chunk.block_table[:count] for chunk, count in zip(chunks, count_N.tolist(), strict=True))
    page_NM[np.arange(page_NM.shape[1]) < count_N[:, None]] = np.fromiter(
        chain.from_iterable(tables), np.int32, count_N.sum()
    )
    return page_NM


def lay_out_segments(
    name: str, slot_N: NDArray[np.int64], count_N: NDArray[np.int64], first_N: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """Rows sorted by slot, of chunks that have `count_N` rows from `first_N` on; see `peftkit_kernels.Segments`."""
    adapted = np.flatnonzero((slot_N >= 0) & (count_N > 0))
    order = adapted[np.argsort(slot_N[adapted], kind="stable")]
    count, begin = count_N[order], count_N[order].cumsum() - count_N[order]
    row_X = np.repeat(first_N[order] - begin, count) + np.arange(count.sum())
    slots, firsts = np.unique(slot_N[order], return_index=True)
    return {
        f"{name}row": row_X.astype(np.int64),
        f"{name}row_slot": np.repeat(slot_N[order], count).astype(np.int32),
        f"{name}start": np.append(begin[firsts], count.sum()).astype(np.int32),
        f"{name}slot": slots.astype(np.int32),
    }
