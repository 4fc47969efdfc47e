"""What a decode step reads, at addresses that never change: one row a request, padded up to a bucket.

A CUDA graph holds the addresses and shapes that it was captured with, so the rows of a step are written into buffers
of a fixed place, and those behind the last request do no harm:

    row        0  1  2 | 3            three requests in the bucket of four
    token      a  b  c | 0
    source    -1  0 -1 | -1           b is what row 0 of the step before has drawn
    cell       own …   | scratch      its keys and values go into a page that no request has
    context    own …   | 1
    row_X      0  2    | 0  0         rows 0 and 2 are adapted
    start_G1   0  1  2 | 2  2         segments behind the last one are empty

All of it is staged in one pinned buffer and goes to the device in one copy. Between two steps of the same requests only
tokens, positions and new pages are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_kernels import Segments, sort_by_slot
from peftkit_serve.batch import Batch, Extras
from peftkit_serve.pages import PAGE_TOKENS, pages_for
from peftkit_serve.plan import Chunk
from peftkit_serve.request import SamplingParams
from peftkit_serve.sampler import Draws, is_plain, signed

_ALIGN = 64  # bytes: kernels are compiled for aligned pointers
_MIN_TABLE = 8  # pages of the narrowest staged block table

_INT64 = ("token", "source", "position", "cell", "segment_row", "seed", "step")
_INT32 = ("context", "num_virtual", "segment_slot", "segment_start", "top_k")
_FLOAT32 = ("temperature", "top_p", "min_p")
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes of a padded step."""

    num_rows: int
    num_segments: int
    """0: all rows are the bare base's."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: powers of two, from 32 on also halfway between, and the maximum."""
    powers = [1 << exponent for exponent in range(max_rows.bit_length())]
    halfway = [3 * power // 2 for power in powers if power >= 32]
    return (*sorted(size for size in {*powers, *halfway} if size < max_rows), max_rows)


def segment_buckets(num_rows: int) -> tuple[int, ...]:
    """Numbers of segments that a step of so many rows is padded to: powers of two from 4 on, and one for each row."""
    powers = [1 << exponent for exponent in range(2, num_rows.bit_length())]
    return (*(size for size in powers if size < num_rows), num_rows)


class DecodeInputs:
    """The buffers, on the host and on the device."""

    def __init__(self, *, last_token_R: Tensor, max_pages: int, scratch_page: int) -> None:
        """
        last_token_R: where a step leaves the tokens that it draws, on the device; R is most requests in a step.
        max_pages: most pages of a block table.
        scratch_page: a page that padded rows may write to.
        """
        self.last_token_R = last_token_R
        max_rows, device = len(last_token_R), last_token_R.device
        self.buckets = row_buckets(max_rows)
        self._max_pages = max_pages
        self._scratch_page, self._scratch_table = scratch_page, (scratch_page,)
        sizes = dict.fromkeys(_INT64, (max_rows, torch.int64)) | dict.fromkeys(_INT32, (max_rows, torch.int32))
        sizes |= dict.fromkeys(_FLOAT32, (max_rows, torch.float32)) | {"segment_start": (max_rows + 1, torch.int32)}
        lengths = [-(-count * dtype.itemsize // _ALIGN) * _ALIGN for count, dtype in sizes.values()]
        starts = dict(zip(sizes, accumulate(lengths, initial=0), strict=False))
        self._num_fixed = sum(lengths)
        num_bytes = self._num_fixed + 4 * max_rows * max_pages
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._staged = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

        def field(buffer: Tensor, name: str) -> Tensor:
            count, dtype = sizes[name]
            return buffer[starts[name] :][: count * dtype.itemsize].view(dtype)

        self._host: dict[str, NDArray[Any]] = {name: field(self._staging, name).numpy() for name in sizes}
        self._at = {name: field(self._staged, name) for name in sizes}
        self._at["source"].fill_(-1)  # until a step is staged too, no row reads what another one has drawn
        self._page_NM = torch.full((max_rows, max_pages), scratch_page, dtype=torch.int32, device=device)
        self._cu_seqlens_N1 = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._row_T = torch.arange(max_rows, device=device)
        self._keys: list[tuple[object, ...]] = [()] * max_rows
        self._is_plain = [True] * max_rows
        self._slots = np.full(max_rows, -1, np.int32)
        self._num_segments = 0
        self._segmented = 0, 0  # rows that the staged segments are for: those of requests, and with the padding
        self._tables: list[tuple[int, ...]] = [()] * max_rows
        self._table_NM: NDArray[np.int32] = np.zeros((max_rows, 0), np.int32)

    def bucket_of(self, num_rows: int) -> int:
        """The smallest bucket that holds so many rows."""
        return next(size for size in self.buckets if size >= num_rows)

    def write(self, chunks: Sequence[Chunk], sources: Sequence[int]) -> Bucket:
        """Stages a step of chunks of one token each and starts its copy to the device; returns the bucket it fills.

        sources: for each chunk the row of its token in the tokens of the step before, -1 where it is known.
        """
        num = len(chunks)
        num_rows = self.bucket_of(num)
        if self._copied is not None:
            self._copied.synchronize()  # of the step before: it lies behind a step whose tokens have been seen
        self._write_requests(chunks)
        starts = [chunk.start for chunk in chunks]
        self._write_tables(chunks, num_rows, pages_for(max(starts) + 1))
        self._write_positions(chunks, sources, np.array(starts), num_rows)
        if self._segmented != (num, num_rows):
            self._write_segments(num, num_rows)
        self._copy(num_rows)
        return Bucket(num_rows, self.segments_of(num_rows, self._num_segments))

    @staticmethod
    def segments_of(num_rows: int, num_segments: int) -> int:
        """The smallest bucket that holds so many segments."""
        return num_segments and next(size for size in segment_buckets(num_rows) if size >= num_segments)

    def batch(self, bucket: Bucket, extras: Extras) -> Batch:
        """The device's buffers as a step of that bucket."""
        rows, at = bucket.num_rows, self._at
        source_T = at["source"][:rows]
        late_T = self.last_token_R.index_select(0, source_T.clamp(min=0))
        segments = None
        if bucket.num_segments:
            start_G1, slot_G = at["segment_start"][: bucket.num_segments + 1], at["segment_slot"][: bucket.num_segments]
            segments = Segments(at["segment_row"][:rows], start_G1, slot_G)
        return Batch(
            token_T=torch.where(source_T < 0, at["token"][:rows], late_T),
            position_T=at["position"][:rows],
            cell_T=at["cell"][:rows],
            cu_seqlens_N1=self._cu_seqlens_N1[: rows + 1],
            context_N=at["context"][:rows],
            page_NM=self._page_NM[:rows],
            num_virtual_N=at["num_virtual"][:rows],
            segments=segments,
            sample_row_X=self._row_T[:rows],
            sample_segments=segments,
            extras=extras,
        )

    def draws(self, num_rows: int) -> Draws:
        """The device's buffers as what the rows are drawn by."""
        return Draws(*(self._at[name][:num_rows] for name in Draws._fields))

    def plain(self, num: int) -> bool:
        """Whether the first `num` rows ask for no more than a draw from their logits as they are."""
        return all(self._is_plain[:num])

    def _write_requests(self, chunks: Sequence[Chunk]) -> None:
        """What stays while a request keeps its row."""
        host, keys = self._host, self._keys
        for row, chunk in enumerate(chunks):
            sample = chunk.sample
            if sample is None:
                key = (chunk.slot, chunk.num_virtual)
            else:
                key = (chunk.slot, chunk.num_virtual, sample.seed, sample.params, sample.constraint is None)
            if keys[row] == key:
                continue
            keys[row] = key
            if self._slots[row] != chunk.slot:
                self._slots[row], self._segmented = chunk.slot, (0, 0)
            self._is_plain[row] = sample is None or is_plain(sample)
            host["num_virtual"][row] = chunk.num_virtual
            params = _GREEDY if sample is None else sample.params
            host["temperature"][row] = params.temperature
            host["top_k"][row] = params.top_k
            host["top_p"][row] = params.top_p
            host["min_p"][row] = params.min_p
            host["seed"][row] = 0 if sample is None else signed(sample.seed)

    def _write_positions(
        self, chunks: Sequence[Chunk], sources: Sequence[int], position_N: NDArray[np.int64], num_rows: int
    ) -> None:
        """What is new in each step; rows without a request have position 0 of the scratch page."""
        num, host = len(chunks), self._host
        page_N = self._table_NM[np.arange(num), position_N // PAGE_TOKENS].astype(np.int64)
        live = {
            "token": [chunk.token_ids[0] for chunk in chunks],
            "source": sources,
            "step": [0 if (sample := chunk.sample) is None else sample.step for chunk in chunks],
            "position": position_N,
            "context": position_N + 1,
            "cell": page_N * PAGE_TOKENS + position_N % PAGE_TOKENS,
        }
        padding = {"token": 0, "source": -1, "step": 0, "position": 0, "context": 1}
        padding["cell"] = self._scratch_page * PAGE_TOKENS
        for name, values in live.items():
            host[name][:num] = values
            host[name][num:num_rows] = padding[name]

    def _write_tables(self, chunks: Sequence[Chunk], num_rows: int, num_pages: int) -> None:
        """Block tables, as wide as the longest one needs, rounded up so that few steps change the width."""
        width = min(self._max_pages, max(_MIN_TABLE, 1 << (num_pages - 1).bit_length()))
        if not width <= self._table_NM.shape[1] <= 4 * width:
            room = self._staging[self._num_fixed :][: 4 * width * len(self._keys)]
            self._table_NM = room.view(torch.int32).view(-1, width).numpy()
            self._tables = [()] * len(self._keys)
        tables, table_NM = self._tables, self._table_NM
        for row, chunk in enumerate(chunks):
            table = chunk.block_table
            if tables[row] is not table:  # a request's is the same object until a page is added
                tables[row] = table
                table_NM[row, : len(table)] = table[: table_NM.shape[1]]
        for row in range(len(chunks), num_rows):
            if tables[row] != self._scratch_table:
                tables[row] = self._scratch_table
                table_NM[row, 0] = self._scratch_page

    def _write_segments(self, num: int, num_rows: int) -> None:
        """Adapted rows sorted by slot; the table's tail are empty segments."""
        segment, host = sort_by_slot(torch.from_numpy(self._slots[:num])), self._host
        num_segments, num_adapted = len(segment.slot_G), len(segment.row_X)
        for name, values, tail in (
            ("segment_row", segment.row_X, 0),
            ("segment_slot", segment.slot_G, 0),
            ("segment_start", segment.start_G1, num_adapted),
        ):
            host[name][: len(values)] = values.numpy()
            host[name][len(values) :] = tail
        self._segmented, self._num_segments = (num, num_rows), num_segments

    def _copy(self, num_rows: int) -> None:
        """One copy to the device, and there one of the block tables, whose staged width changes, into their place."""
        width = self._table_NM.shape[1]
        num_bytes = self._num_fixed + 4 * width * num_rows
        self._staged[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        staged_NM = self._staged[self._num_fixed : num_bytes].view(torch.int32).view(num_rows, width)
        self._page_NM[:num_rows, :width].copy_(staged_NM)
