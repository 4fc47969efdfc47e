"""The order of an epoch as micro-batches: a function of the lengths, the seed and the epoch alone.

So a place in the data is (epoch, row, micro-batches taken), and a resumed run goes on in the same order. Data in
memory is planned an epoch at a time and `row` is 0; a stream a pool of rows at a time, and `row` is its first.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from peftkit.data.collate import Batch, collate, collate_packed
from peftkit.data.dataset import POOL_ROWS, Encoded, Stream
from peftkit.data.encode import Sample
from peftkit.data.packing import fill_rows
from peftkit.errors import DataError

_POOL = 16
"""Batches' worth of rows among which rows of like length are put together: enough that little is padding, few enough
that the order stays random."""

_PER_ROW = 8
"""Samples of a packed row on average: more leave hardly less padding and cost attention over a longer row."""

Plan = list[list[list[int]]]
"""Micro-batches of rows of sample indices; a row is one sample unless rows are packed."""


class Position(NamedTuple):
    """A place in the data."""

    epoch: int = 0
    row: int = 0
    """Rows of a stream before the pool at hand."""
    taken: int = 0
    """Micro-batches taken of the epoch, or of a stream's pool."""


class Shape(NamedTuple):
    """Size of a micro-batch."""

    rows: int
    length: int
    """Tokens of its longest row."""
    tokens: int
    """Without padding."""
    targets: int
    """Tokens that are trained."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How samples are put into micro-batches."""

    seed: int
    batch_tokens: int
    """Most tokens of a micro-batch, padding included; used when batch_size is None."""
    batch_size: int | None = None
    """Samples of a micro-batch."""
    width: int | None = None
    """Most tokens of a packed row; None packs nothing."""

    def plan(self, lengths: Sequence[int], part: str) -> Plan:
        """Micro-batches over all samples, each once, in a random order that `part` names."""
        if self.width is None:
            return [[[sample] for sample in batch] for batch in self._plan_samples(lengths, part)]
        if not lengths:
            return []
        width = min(self.width, max(max(lengths), _PER_ROW * sum(lengths) // len(lengths)))
        if self.batch_size is not None:
            return [_even_rows(batch, lengths, width, self.width) for batch in self._plan_samples(lengths, part)]
        return _plan_packed(lengths, random.Random(f"{self.seed}/{part}"), self.batch_tokens, width)

    def collate(self, samples: Sequence[Sample], batch: list[list[int]]) -> Batch:
        """A planned micro-batch as tensors."""
        if self.width is None:
            return collate([samples[index] for row in batch for index in row])
        return collate_packed([[samples[index] for index in row] for row in batch])

    def _plan_samples(self, lengths: Sequence[int], part: str) -> list[list[int]]:
        return plan_epoch(
            lengths, seed=self.seed, epoch=part, batch_tokens=self.batch_tokens, batch_size=self.batch_size
        )


class Batches(Protocol):
    """A walk through the data in windows: the micro-batches of one optimiser step. A window ends with its epoch."""

    @property
    def position(self) -> Position: ...

    @position.setter
    def position(self, value: Position) -> None: ...

    def next_window(self) -> list[Batch]:
        """The next micro-batches, at least one."""
        ...

    def shapes(self) -> list[Shape]:
        """Sizes of the micro-batches of the epoch at hand, or of a stream's pool."""
        ...


class Sampler:
    """Walks through samples in memory."""

    def __init__(self, samples: Sequence[Sample], batching: Batching, *, window: int) -> None:
        self._samples, self._batching, self._window = samples, batching, window
        self._lengths = [len(sample.ids) for sample in samples]
        self.position = Position()

    @property
    def position(self) -> Position:
        """Set it to go on from there."""
        return Position(self._epoch, 0, self._taken)

    @position.setter
    def position(self, value: Position) -> None:
        self._epoch, _, self._taken = value
        self._plan = self._batching.plan(self._lengths, str(self._epoch))

    def next_window(self) -> list[Batch]:
        """The next micro-batches, at least one."""
        if self._taken >= len(self._plan):
            self.position = Position(self._epoch + 1)
        window = self._plan[self._taken : self._taken + self._window]
        self._taken += len(window)
        return [self._batching.collate(self._samples, batch) for batch in window]

    def num_windows(self, epochs: int) -> int:
        """Windows in the first `epochs` epochs."""
        if self._batching.batch_size is not None:  # each epoch has as many micro-batches
            return epochs * math.ceil(math.ceil(len(self._samples) / self._batching.batch_size) / self._window)
        plans = (self._batching.plan(self._lengths, str(epoch)) for epoch in range(epochs))
        return sum(math.ceil(len(plan) / self._window) for plan in plans)

    def shapes(self) -> list[Shape]:
        """Sizes of the micro-batches of the epoch at hand."""
        return _shapes(self._plan, self._samples)


class StreamSampler:
    """Walks through a stream: rows are shuffled and put into micro-batches within pools of `POOL_ROWS`."""

    def __init__(self, stream: Stream, batching: Batching, *, window: int) -> None:
        self._stream, self._batching, self._window = stream, batching, window
        self.position = Position()

    @property
    def position(self) -> Position:
        """Set it to go on from there: rows before the pool are skipped, not encoded."""
        return Position(self._epoch, self._row, self._taken)

    @position.setter
    def position(self, value: Position) -> None:
        self._epoch, self._row, self._taken = value
        self._rows: Iterator[Encoded] = self._stream.read(self._row)
        self._read_pool()

    def next_window(self) -> list[Batch]:
        """The next micro-batches, at least one."""
        window = self._take()
        if not window:
            self.position = Position(self._epoch + 1)
            window = self._take()
        if not window:
            raise DataError(f"{self._stream.name}: no row is left to train on")
        return window

    def shapes(self) -> list[Shape]:
        """Sizes of the micro-batches of the pool at hand."""
        return _shapes(self._plan, self._samples)

    def _take(self) -> list[Batch]:
        """What is left of a window in this epoch."""
        window: list[Batch] = []
        while len(window) < self._window:
            while self._taken >= len(self._plan) and self._num_read:
                self._row += self._num_read
                self._taken = 0
                self._read_pool()
            if not self._num_read:
                break
            window.append(self._batching.collate(self._samples, self._plan[self._taken]))
            self._taken += 1
        return window

    def _read_pool(self) -> None:
        pool = list(islice(self._rows, POOL_ROWS))
        self._num_read = len(pool)
        self._samples = [sample for row in pool for sample in row.samples]
        lengths = [len(sample.ids) for sample in self._samples]
        self._plan = self._batching.plan(lengths, f"{self._epoch}/{self._row}")


def padding_share(shapes: Sequence[Shape]) -> float:
    """Share of what is computed that is padding."""
    computed = sum(shape.rows * shape.length for shape in shapes)
    return 1 - sum(shape.tokens for shape in shapes) / computed if computed else 0.0


def plan_epoch(
    lengths: Sequence[int], *, seed: int, epoch: int | str, batch_tokens: int, batch_size: int | None
) -> list[list[int]]:
    """Micro-batches of one epoch, in random order; each row is in exactly one.

    With `batch_size` a batch is that many rows drawn at random (the last may have fewer). When it is None, rows of like
    length go together, as many as fill `batch_tokens` padded tokens (a row longer than that is alone): a batch of few
    rows of one length would be a noisier sample of the data, a large one saves its padding.
    """
    shuffle = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    if batch_size is not None:
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    batches: list[list[int]] = []
    for pool in _pools(order, lengths, batch_tokens):
        batches += _fill(sorted(pool, key=lambda row: lengths[row]), lengths, batch_tokens)
    shuffle.shuffle(batches)
    return batches


def plan_evaluation(lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """All rows once, those of like length together, the same each time."""
    return _fill(sorted(range(len(lengths)), key=lambda row: lengths[row]), lengths, batch_tokens)


def _plan_packed(lengths: Sequence[int], shuffle: random.Random, batch_tokens: int, width: int) -> Plan:
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    rows: list[list[int]] = []
    for pool in _pools(order, lengths, batch_tokens):
        packed = fill_rows(pool, lengths, width)
        shuffle.shuffle(packed)  # the packer puts long samples first
        rows += packed
    per_batch = max(batch_tokens // width, 1)
    batches = [rows[i : i + per_batch] for i in range(0, len(rows), per_batch)]
    shuffle.shuffle(batches)
    return batches


def _even_rows(samples: Sequence[int], lengths: Sequence[int], width: int, most: int) -> list[list[int]]:
    """Few samples in rows of like length, about `width` tokens and at most `most`: as many rows as that takes."""
    total = sum(lengths[sample] for sample in samples)
    num_rows = max(round(total / width), math.ceil(total / most))
    width = max(max(lengths[sample] for sample in samples), math.ceil(total / max(num_rows, 1)))
    while True:
        rows = fill_rows(samples, lengths, min(width, most))
        if len(rows) <= num_rows or width >= most:
            return rows
        width += width // 16 + 1


def _pools(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[Sequence[int]]:
    size = _POOL * max(batch_tokens * len(lengths) // max(sum(lengths), 1), 1)
    return (order[i : i + size] for i in range(0, len(order), size))


def _fill(rows: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cuts rows of rising length into batches whose padded size is at most `batch_tokens`."""
    batches: list[list[int]] = []
    batch: list[int] = []
    for row in rows:
        if batch and (len(batch) + 1) * lengths[row] > batch_tokens:
            batches.append(batch)
            batch = []
        batch.append(row)
    return [*batches, batch] if batch else batches


def _shapes(plan: Plan, samples: Sequence[Sample]) -> list[Shape]:
    shapes: list[Shape] = []
    for batch in plan:
        lengths = [sum(len(samples[index].ids) for index in row) for row in batch]
        targets = sum(int(samples[index].trained.sum()) for row in batch for index in row)
        shapes.append(Shape(len(batch), max(lengths), sum(lengths), targets))
    return shapes
