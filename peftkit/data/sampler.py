"""The order of an epoch as micro-batches of row indices: a function of the lengths, the seed and the epoch alone.

So a position in the data is (epoch, micro-batch), and a resumed run goes on in the same order.
"""

import math
import random
from collections.abc import Sequence

_POOL = 16
"""Batches' worth of rows among which rows of like length are put together: enough that little is padding, few enough
that the order stays random."""


class Sampler:
    """Walks through the epochs in windows: the micro-batches of one optimiser step. A window ends with its epoch."""

    def __init__(
        self, lengths: Sequence[int], *, seed: int, batch_tokens: int, batch_size: int | None, window: int
    ) -> None:
        self._lengths, self._seed = lengths, seed
        self._batch_tokens, self._batch_size, self._window = batch_tokens, batch_size, window
        self.position = (0, 0)

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, micro-batches taken of it); set it to go on from there."""
        return self._epoch, self._taken

    @position.setter
    def position(self, value: tuple[int, int]) -> None:
        self._epoch, self._taken = value
        self._plan = self._plan_of(self._epoch)

    @property
    def plan(self) -> Sequence[Sequence[int]]:
        """The micro-batches of the current epoch."""
        return self._plan

    def next_window(self) -> list[list[int]]:
        """The next micro-batches of row indices, at least one."""
        if self._taken >= len(self._plan):
            self.position = (self._epoch + 1, 0)
        window = self._plan[self._taken : self._taken + self._window]
        self._taken += len(window)
        return window

    def num_windows(self, epochs: int) -> int:
        """Windows in the first `epochs` epochs."""
        return sum(math.ceil(len(self._plan_of(epoch)) / self._window) for epoch in range(epochs))

    def _plan_of(self, epoch: int) -> list[list[int]]:
        return plan_epoch(
            self._lengths,
            seed=self._seed,
            epoch=epoch,
            batch_tokens=self._batch_tokens,
            batch_size=self._batch_size,
        )


def plan_epoch(
    lengths: Sequence[int], *, seed: int, epoch: int, batch_tokens: int, batch_size: int | None
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
    pool_rows = _POOL * max(batch_tokens * len(lengths) // max(sum(lengths), 1), 1)
    batches: list[list[int]] = []
    for i in range(0, len(order), pool_rows):
        batches += _fill(sorted(order[i : i + pool_rows], key=lambda row: lengths[row]), lengths, batch_tokens)
    shuffle.shuffle(batches)
    return batches


def plan_evaluation(lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """All rows once, those of like length together, the same each time."""
    return _fill(sorted(range(len(lengths)), key=lambda row: lengths[row]), lengths, batch_tokens)


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
