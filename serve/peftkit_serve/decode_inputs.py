"""What a decode step reads, at addresses that never change: one row a request, padded up to a bucket.

A CUDA graph holds the addresses and shapes that it was captured with, so the rows of a step are written into buffers
of a fixed place, and those behind the last request do no harm:

    row        0  1  2 | 3            three requests in the bucket of four
    token      a  b  c | 0
    source    -1  0 -1 | -1           b is what row 0 of the step before has drawn
    cell       own …   | scratch      its keys and values go into a page that no request has
    context    own …   | 1
    row_X      0  2    | 0  0         rows 0 and 2 are adapted
    row_slot_X own …   | -1 -1        the slots of these rows
    start_G1   0  1  2 | 2  2         segments behind the last one are empty

All of it is staged in one pinned buffer and goes to the device in one copy. Between two steps of the same requests only
tokens, positions and new pages are written.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_kernels import Segments, sort_by_slot
from peftkit_serve.batch import Batch
from peftkit_serve.pages import PAGE_TOKENS, pages_for
from peftkit_serve.plan import Chunk
from peftkit_serve.request import SamplingParams
from peftkit_serve.sampler import Draws, is_plain, signed
from peftkit_serve.staging import Bucket, Reach, Staging

_INT64 = ("token", "source", "position", "cell", "segment_row", "seed", "step")
_INT32 = ("context", "num_virtual", "segment_slot", "segment_start", "segment_row_slot", "top_k")
_FLOAT32 = ("temperature", "top_p", "min_p")
_GREEDY = SamplingParams(temperature=0.0)


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: powers of two, from 32 on also halfway between, and the maximum."""
    powers = [1 << exponent for exponent in range(max_rows.bit_length())]
    halfway = [3 * power // 2 for power in powers if power >= 32]
    return (*sorted(size for size in {*powers, *halfway} if size < max_rows), max_rows)


def segment_buckets(num_rows: int, reach: Reach) -> tuple[int, ...]:
    """Numbers of segments that a step of so many rows is padded to: powers of two from 4 on, and one for each row;
    16 and one for each row where adapters may have all, which is rare."""
    sizes = [16] if reach is Reach.ALL else [1 << exponent for exponent in range(2, num_rows.bit_length())]
    return (*(size for size in sizes if size < num_rows), num_rows)


class DecodeInputs:
    """The buffers, on the host and on the device."""

    def __init__(self, *, last_token_R: Tensor, page_NM: Tensor, scratch_page: int) -> None:
        """
        last_token_R: where a step leaves the tokens that it draws, on the device; R is most requests in a step.
        page_NM: where block tables of R rows go, on the device.
        scratch_page: a page that padded rows may write to.
        """
        self.last_token_R = last_token_R
        max_rows, device = len(last_token_R), last_token_R.device
        self._rows = row_buckets(max_rows)
        self._scratch_page, self._scratch_table = scratch_page, (scratch_page,)
        sizes = dict.fromkeys(_INT64, (max_rows, torch.int64)) | dict.fromkeys(_INT32, (max_rows, torch.int32))
        sizes |= dict.fromkeys(_FLOAT32, (max_rows, torch.float32)) | {"segment_start": (max_rows + 1, torch.int32)}
        self._staging = Staging(sizes, page_NM)
        self._host, self._at = self._staging.host, self._staging.at
        self._at["source"].fill_(-1)  # until a step is staged too, no row reads what another one has drawn
        self._at["segment_row_slot"].fill_(-1)  # nor is a row adapted
        self._cu_seqlens_N1 = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._row_T = torch.arange(max_rows, device=device)
        self._keys: list[tuple[object, ...]] = [()] * max_rows
        self._is_plain = [True] * max_rows
        self.plain = True
        """Whether no row of the step staged last asks for more than a draw from its logits as they are."""
        self._slots = np.full(max_rows, -1, np.int32)
        self._num_segments = 0
        self._segmented = 0, 0  # rows that the staged segments are for: those of requests, and with the padding
        self._tables: list[tuple[int, ...]] = [()] * max_rows

    def buckets(self) -> list[Bucket]:
        """All that steps are padded to."""
        found = [Bucket(rows, rows, 0, Reach.ATTENTION) for rows in self._rows]
        for rows in self._rows:
            found += [Bucket(rows, rows, size, reach) for reach in Reach for size in segment_buckets(rows, reach)]
        return found

    def bucket_of(self, num_rows: int) -> int:
        """The smallest bucket that holds so many rows."""
        return next(size for size in self._rows if size >= num_rows)

    def write(self, chunks: Sequence[Chunk], sources: Sequence[int], reach: Reach) -> Bucket:
        """Stages a step of chunks of one token each and starts its copy to the device; returns the bucket it fills.

        sources: for each chunk the row of its token in the tokens of the step before, -1 where it is known.
        """
        num = len(chunks)
        num_rows = self.bucket_of(num)
        self._staging.wait()
        self._write_requests(chunks)
        self.plain = all(self._is_plain[:num])
        starts = [chunk.start for chunk in chunks]
        self._write_tables(chunks, num_rows, pages_for(max(starts) + 1))
        self._write_positions(chunks, sources, np.array(starts), num_rows)
        if self._segmented != (num, num_rows):
            self._write_segments(num, num_rows)
        self._staging.copy(num_rows)
        if not self._num_segments:
            return Bucket(num_rows, num_rows, 0, Reach.ATTENTION)
        num_segments = next(size for size in segment_buckets(num_rows, reach) if size >= self._num_segments)
        return Bucket(num_rows, num_rows, num_segments, reach)

    def batch(self, bucket: Bucket) -> Batch:
        """The device's buffers as a step of that bucket."""
        rows, at = bucket.num_rows, self._at
        source_T = at["source"][:rows]
        late_T = self.last_token_R.index_select(0, source_T.clamp(min=0))
        segments = None
        if bucket.num_segments:
            start_G1, slot_G = at["segment_start"][: bucket.num_segments + 1], at["segment_slot"][: bucket.num_segments]
            segments = Segments(at["segment_row"][:rows], start_G1, slot_G, at["segment_row_slot"][:rows])
        return Batch(
            token_T=torch.where(source_T < 0, at["token"][:rows], late_T),
            position_T=at["position"][:rows],
            cell_T=at["cell"][:rows],
            cu_seqlens_N1=self._cu_seqlens_N1[: rows + 1],
            context_N=at["context"][:rows],
            page_NM=self._staging.page_NM[:rows],
            num_virtual_N=at["num_virtual"][:rows],
            segments=segments,
            sample_row_X=self._row_T[:rows],
            sample_segments=segments,
            extras=bucket.reach.extras,
        )

    def draws(self, bucket: Bucket) -> Draws:
        """The device's buffers as what the rows are drawn by."""
        return Draws(*(self._at[name][: bucket.num_rows] for name in Draws._fields))

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
        page_N = self._staging.table_NM[np.arange(num), position_N // PAGE_TOKENS].astype(np.int64)
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
        """Block tables; those of requests that keep their row are there."""
        if self._staging.make_room(num_pages):
            self._tables = [()] * len(self._keys)
        tables, table_NM = self._tables, self._staging.table_NM
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
            ("segment_row_slot", segment.row_slot_X, -1),
        ):
            host[name][: len(values)] = values.numpy()
            host[name][len(values) :] = tail
        self._segmented, self._num_segments = (num, num_rows), num_segments
