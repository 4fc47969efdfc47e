"""What a step with prompts in it reads, at addresses that never change: any chunks, padded up to a bucket.

    chunk      0        1  2 | 3            three requests in the bucket of four
    row        0  1  2  3  4 | 5 … 15       five tokens in the bucket of sixteen
    token      a  b  c  d  e | 0
    source    -1 -1 -1  0 -1 | -1           d is what row 0 of the step before has drawn
    cell       own …         | scratch      their keys and values go into a page that no request has
    cu_seqlens 0        3  4 | 5  5         requests behind the last one have no rows
    sample_row 2        3  4 | 0            every chunk's last row, whether it draws or not
    row_X      0  1  2  4    | 0 …          the rows of chunks 0 and 2 are adapted
    row_slot_X own …         | -1 …         the slots of these rows
    start_G1   0        3  4 | 4  4         segments behind the last one are empty

A bucket has more tokens than requests, from which attention knows that there are prompts in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_kernels import Segments
from peftkit_serve.batch import Batch
from peftkit_serve.pages import PAGE_TOKENS
from peftkit_serve.plan import Chunk, Sample
from peftkit_serve.request import SamplingParams
from peftkit_serve.sampler import Draws, is_plain, lay_out_draws
from peftkit_serve.staging import Bucket, Reach, Staging
from peftkit_serve.step_inputs import lay_out_rows, lay_out_segments

_TOKENS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 1024)
"""Tokens of buckets. A larger step takes a card longer than the host needs to launch it."""
_ROWS = (4, 16, 64)
_SEGMENTS = {Reach.ATTENTION: (4, 16, 64, 128), Reach.LINEARS: (4, 16, 64, 128), Reach.ALL: (16,)}
_NOTHING = Sample(SamplingParams(temperature=0.0), 0, 0)


class _Field(NamedTuple):
    per: Literal["token", "row", "bound"]
    """What it has an entry for; bounds of rows are one more than rows."""
    dtype: torch.dtype
    padding: int = 0
    """What stands behind the live entries; a cell is the scratch page's, and the last of bounds is repeated."""


_FIELDS = {
    "token": _Field("token", torch.int64),
    "source": _Field("token", torch.int64, padding=-1),
    "position": _Field("token", torch.int64),
    "cell": _Field("token", torch.int64),
    "segment_row": _Field("token", torch.int64),
    "cu_seqlens": _Field("bound", torch.int32),
    "context": _Field("row", torch.int32),
    "num_virtual": _Field("row", torch.int32),
    "segment_row_slot": _Field("token", torch.int32, padding=-1),
    "segment_start": _Field("bound", torch.int32),
    "segment_slot": _Field("row", torch.int32),
    "sample_row": _Field("row", torch.int64),
    "sample_segment_row": _Field("row", torch.int64),
    "sample_segment_row_slot": _Field("row", torch.int32, padding=-1),
    "sample_segment_start": _Field("bound", torch.int32),
    "sample_segment_slot": _Field("row", torch.int32),
    "temperature": _Field("row", torch.float32),
    "top_k": _Field("row", torch.int32),
    "top_p": _Field("row", torch.float32, padding=1),
    "min_p": _Field("row", torch.float32),
    "seed": _Field("row", torch.int64),
    "step": _Field("row", torch.int64),
}


def mixed_buckets(max_tokens: int, max_rows: int) -> tuple[Bucket, ...]:
    """The buckets for steps of so many tokens and requests at most."""
    found: list[Bucket] = []
    for num_tokens in token_buckets(max_tokens):
        for num_rows in _up_to(min(max_rows, num_tokens - 1), _ROWS):
            found.append(Bucket(num_tokens, num_rows, 0, Reach.ATTENTION))
            for reach, few in _SEGMENTS.items():
                found += [Bucket(num_tokens, num_rows, size, reach) for size in _up_to(num_rows, few)]
    return tuple(found)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that steps of so many at most are padded to."""
    return _up_to(min(max_tokens, _TOKENS[-1]), _TOKENS)


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
        self._max_tokens, self._max_rows = max_tokens, len(last_token_R)
        self._tokens = token_buckets(max_tokens)
        most = Bucket(self._tokens[-1], self._max_rows, 0, Reach.ATTENTION)
        sizes = {name: (_count(field, most), field.dtype) for name, field in _FIELDS.items()}
        self._staging = Staging(sizes, page_NM)
        self._host, self._at = self._staging.host, self._staging.at
        self._at["source"].fill_(-1)  # until a step is staged too, no row reads what another one has drawn
        for name in ("segment_row_slot", "sample_segment_row_slot"):
            self._at[name].fill_(-1)  # nor is a row adapted
        self._padding = {name: field.padding for name, field in _FIELDS.items()} | {"cell": scratch_page * PAGE_TOKENS}
        self.plain = True
        """Whether no row of the step staged last asks for more than a draw from its logits as they are."""

    def buckets(self) -> list[Bucket]:
        """All that steps are padded to."""
        return list(mixed_buckets(self._max_tokens, self._max_rows))

    def holds(self, num_tokens: int, num_rows: int) -> bool:
        """Whether there is a bucket for a step of so many tokens and requests."""
        return num_rows <= self._max_rows and max(num_tokens, num_rows + 1) <= self._tokens[-1]

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
        at = {name: self._at[name][: _count(field, bucket)] for name, field in _FIELDS.items()}
        late_T = self.last_token_R.index_select(0, at["source"].clamp(min=0))
        segments = sample_segments = None
        if bucket.num_segments:
            segments, sample_segments = (
                Segments(
                    at[f"{name}row"],
                    at[f"{name}start"][: bucket.num_segments + 1],
                    at[f"{name}slot"][: bucket.num_segments],
                    at[f"{name}row_slot"],
                )
                for name in ("segment_", "sample_segment_")
            )
        return Batch(
            token_T=torch.where(at["source"] < 0, at["token"], late_T),
            position_T=at["position"],
            cell_T=at["cell"],
            cu_seqlens_N1=at["cu_seqlens"],
            context_N=at["context"],
            page_NM=self._staging.page_NM[: bucket.num_rows],
            num_virtual_N=at["num_virtual"],
            segments=segments,
            sample_row_X=at["sample_row"],
            sample_segments=sample_segments,
            extras=bucket.reach.extras,
        )

    def draws(self, bucket: Bucket) -> Draws:
        """The device's buffers as what the chunks' last rows are drawn by."""
        return Draws(*(self._at[name][: bucket.num_rows] for name in Draws._fields))

    def _bucket_of(self, num_tokens: int, num_rows: int, num_segments: int, reach: Reach) -> Bucket:
        tokens = next(size for size in self._tokens if size >= max(num_tokens, num_rows + 1))
        rows = next(size for size in _up_to(min(self._max_rows, tokens - 1), _ROWS) if size >= num_rows)
        if not num_segments:
            return Bucket(tokens, rows, 0, Reach.ATTENTION)
        return Bucket(
            tokens, rows, next(size for size in _up_to(rows, _SEGMENTS[reach]) if size >= num_segments), reach
        )

    def _write(self, fields: Mapping[str, NDArray[Any]], bucket: Bucket) -> None:
        """The fields with what stands behind them up to the bucket's sizes."""
        for name, values in fields.items():
            host, field = self._host[name], _FIELDS[name]
            host[: len(values)] = values
            host[len(values) : _count(field, bucket)] = values[-1] if field.per == "bound" else self._padding[name]


def _count(field: _Field, bucket: Bucket) -> int:
    """Entries of a field in a bucket."""
    return bucket.num_tokens if field.per == "token" else bucket.num_rows + (field.per == "bound")
