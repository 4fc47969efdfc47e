"""What a step with prompts in it reads, at addresses that never change: any chunks, padded up to a bucket.

    chunk      0        1  2 | 3            three requests in the bucket of four
    row        0  1  2  3  4 | 5 … 15       five tokens in the bucket of sixteen
    token      a  b  c  d  e | 0
    source    -1 -1 -1  0 -1 | -1           d is what row 0 of the step before has drawn
    cell       own …         | scratch      their keys and values go into a page that no request has
    cu_seqlens 0        3  4 | 5  5         requests behind the last one have no rows
    sample_row 2        3  4 | 0            every chunk's last row, whether it draws or not
    row_X      0  1  2  4    | 0 …          the rows of chunks 0 and 2 are adapted
    start_G1   0        3  4 | 4  4         segments behind the last one are empty

A bucket has more tokens than requests, from which attention knows that there are prompts in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_kernels import Segments
from peftkit_serve.batch import Batch
from peftkit_serve.pages import PAGE_TOKENS
from peftkit_serve.plan import Chunk, Sample
from peftkit_serve.request import SamplingParams
from peftkit_serve.sampler import Draws, is_plain
from peftkit_serve.staging import Bucket, Reach, Staging
from peftkit_serve.step_inputs import lay_out_draws, lay_out_rows, lay_out_segments

_TOKENS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 1024)
"""Tokens of buckets. A larger step takes a card longer than the host needs to launch it."""
_ROWS = (4, 16, 64)
_SEGMENTS = {Reach.ATTENTION: (4, 16, 64, 128), Reach.LINEARS: (4, 16, 64, 128), Reach.ALL: (16,)}
_NOTHING = Sample(SamplingParams(temperature=0.0), 0, 0)

_OF_TOKENS = {"token": 0, "source": -1, "position": 0, "cell": 0, "segment_row": 0}
"""Field → what stands behind the live entries; a cell is the scratch page's."""
_OF_ROWS = {
    "num_virtual": 0, "context": 0, "segment_slot": 0, "sample_row": 0, "sample_segment_row": 0,
    "sample_segment_slot": 0, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "step": 0,
}  # fmt: skip
_FROM_ROWS = ("cu_seqlens", "segment_start", "sample_segment_start")
"""One entry more than rows; behind the live entries the last one is repeated."""
_INT64 = {"token", "source", "position", "cell", "segment_row", "sample_row", "sample_segment_row", "seed", "step"}
_FLOAT32 = {"temperature", "top_p", "min_p"}


def mixed_buckets(max_tokens: int, max_rows: int) -> tuple[Bucket, ...]:
    """The buckets for steps of so many tokens and requests at most, in the order in which they are tried."""
    most = min(max_tokens, _TOKENS[-1])
    found: list[Bucket] = []
    for num_tokens in (*(size for size in _TOKENS if size < most), most):
        for num_rows in _up_to(min(max_rows, num_tokens - 1), _ROWS):
            found.append(Bucket(num_tokens, num_rows, 0, Reach.ATTENTION))
            for reach, few in _SEGMENTS.items():
                found += [Bucket(num_tokens, num_rows, size, reach) for size in _up_to(num_rows, few)]
    return tuple(found)


def _up_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes below `most`, and it."""
    return (*(size for size in sizes if size < most), most) if most else ()


class MixedInputs:
    """The buffers, on the host and on the device."""

    def __init__(self, *, last_token_R: Tensor, page_NM: Tensor, scratch_page: int, max_tokens: int) -> None:
        """
        last_token_R, page_NM, scratch_page: as `DecodeInputs` has them.
        max_tokens: most tokens of a step.
        """
        self.last_token_R = last_token_R
        self._buckets = mixed_buckets(max_tokens, len(last_token_R))
        most_tokens, most_rows = min(max_tokens, _TOKENS[-1]), len(last_token_R)
        counts = dict.fromkeys(_OF_TOKENS, most_tokens) | dict.fromkeys(_OF_ROWS, most_rows)
        counts |= dict.fromkeys(_FROM_ROWS, most_rows + 1)
        self._staging = Staging({name: (count, _dtype(name)) for name, count in counts.items()}, page_NM)
        self._host, self._at = self._staging.host, self._staging.at
        self._at["source"].fill_(-1)  # until a step is staged too, no row reads what another one has drawn
        self._padding = _OF_TOKENS | _OF_ROWS | {"cell": scratch_page * PAGE_TOKENS}
        self.plain = True
        """Whether no row of the step staged last asks for more than a draw from its logits as they are."""

    def buckets(self) -> list[Bucket]:
        """All that steps are padded to."""
        return list(self._buckets)

    def holds(self, num_tokens: int, num_rows: int) -> bool:
        """Whether there is a bucket for a step of so many tokens and requests."""
        return any(one.num_tokens >= num_tokens and one.num_rows >= num_rows for one in self._buckets)

    def write(self, chunks: Sequence[Chunk], sources: Sequence[int], reach: Reach) -> Bucket:
        """Stages a step that `holds` has accepted and starts its copy to the device; returns the bucket it fills.

        sources: for each chunk the row of its last token in the tokens of the step before, -1 where it is known.
        """
        samples = [chunk.sample or _NOTHING for chunk in chunks]
        rows = lay_out_rows(chunks)
        num, last_N = len(chunks), rows.cu_N1[1:] - 1
        once_N = np.ones_like(rows.length_N)
        fields = {
            **rows.fields,
            "sample_row": last_N,
            **lay_out_segments("segment_", rows.slot_N, rows.length_N, rows.cu_N1[:-1]),
            **lay_out_segments("sample_segment_", rows.slot_N, once_N, once_N.cumsum() - 1),
            **lay_out_draws(samples),
        }
        bucket = self._bucket_of(len(fields["token"]), num, len(fields["segment_slot"]), reach)
        self._staging.wait()
        self._write(fields, bucket)
        self._host["source"][: bucket.num_tokens] = -1
        self._host["source"][last_N] = sources
        self._staging.make_room(rows.page_NM.shape[1])
        self._staging.table_NM[:num, : rows.page_NM.shape[1]] = rows.page_NM
        self._staging.copy(num)
        self.plain = all(is_plain(sample) for sample in samples)
        return bucket

    def batch(self, bucket: Bucket) -> Batch:
        """The device's buffers as a step of that bucket."""
        num_tokens, num_rows = bucket.num_tokens, bucket.num_rows
        tokens = {name: self._at[name][:num_tokens] for name in _OF_TOKENS}
        rows = {name: self._at[name][:num_rows] for name in _OF_ROWS}
        late_T = self.last_token_R.index_select(0, tokens["source"].clamp(min=0))
        segments = sample_segments = None
        if bucket.num_segments:
            segments = self._segments("segment_", tokens["segment_row"], bucket)
            sample_segments = self._segments("sample_segment_", rows["sample_segment_row"], bucket)
        return Batch(
            token_T=torch.where(tokens["source"] < 0, tokens["token"], late_T),
            position_T=tokens["position"],
            cell_T=tokens["cell"],
            cu_seqlens_N1=self._at["cu_seqlens"][: num_rows + 1],
            context_N=rows["context"],
            page_NM=self._staging.page_NM[:num_rows],
            num_virtual_N=rows["num_virtual"],
            segments=segments,
            sample_row_X=rows["sample_row"],
            sample_segments=sample_segments,
            extras=bucket.reach.extras,
        )

    def draws(self, bucket: Bucket) -> Draws:
        """The device's buffers as what the chunks' last rows are drawn by."""
        return Draws(*(self._at[name][: bucket.num_rows] for name in Draws._fields))

    def _segments(self, name: str, row_X: Tensor, bucket: Bucket) -> Segments:
        start_G1 = self._at[f"{name}start"][: bucket.num_segments + 1]
        return Segments(row_X, start_G1, self._at[f"{name}slot"][: bucket.num_segments])

    def _bucket_of(self, num_tokens: int, num_rows: int, num_segments: int, reach: Reach) -> Bucket:
        if not num_segments:
            reach = Reach.ATTENTION
        return next(
            one
            for one in self._buckets
            if one.num_tokens >= num_tokens
            and one.num_rows >= num_rows
            and one.num_segments >= num_segments
            and one.reach == reach
            and (one.num_segments > 0) == (num_segments > 0)
        )

    def _write(self, fields: Mapping[str, NDArray[Any]], bucket: Bucket) -> None:
        """The fields with what stands behind them up to the bucket's sizes."""
        for name, values in fields.items():
            host = self._host[name]
            size = bucket.num_tokens if name in _OF_TOKENS else bucket.num_rows
            host[: len(values)] = values
            if name in _FROM_ROWS:
                host[len(values) : size + 1] = values[-1]
            else:
                host[len(values) : size] = self._padding[name]


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name in _INT64 else torch.float32 if name in _FLOAT32 else torch.int32
