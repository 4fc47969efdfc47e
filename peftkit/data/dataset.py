"""Data that is held encoded in memory, and data that is encoded as it is read."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from transformers import PreTrainedTokenizerBase

from peftkit.chat import unlike_served
from peftkit.data.encode import Sample, TooLongError, Turns, encode_row
from peftkit.data.formats import ChatRow, Format, InstructionRow, Row, read_rows, row_key
from peftkit.data.sources import Source, open_source
from peftkit.errors import DataError

logger = logging.getLogger(__name__)

POOL_ROWS = 1024
"""Rows of a stream that are drawn from at a time."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How rows become samples."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Most tokens of a sample."""
    format: Format = "auto"
    turns: Turns = "all"
    """Which of the assistant's turns of a chat are trained."""
    drop_too_long: bool = False
    """Leave out rows whose answer doesn't fit; else they are an error."""

    def read(self, source: Source, start: int = 0) -> Iterator["Encoded"]:
        """The rows of a source from `start` on, encoded one by one."""
        for row in read_rows(source, self.format, start=start):
            encoded = self.encode(row)
            if not start:
                self.compare_with_served(row)
                start = 1
            yield encoded

    def compare_with_served(self, row: Row) -> None:
        """Warns where the base's chat template has answers begin otherwise when they are served than in this row."""
        if isinstance(row, InstructionRow) and self.tokenizer.chat_template:
            row = row.as_chat()
        if isinstance(row, ChatRow) and (start := unlike_served(self.tokenizer, row.messages, tools=row.tools)):
            logger.warning(
                "%s: the base's chat template has a served answer begin after %r, which isn't there in a whole "
                "conversation: the model is trained otherwise than it will be asked",
                row.where,
                start,
            )

    def encode(self, row: Row) -> "Encoded":
        """One row as samples, none where it is dropped."""
        try:
            samples = encode_row(row, self.tokenizer, self.max_length, turns=self.turns)
        except TooLongError:
            if not self.drop_too_long:
                raise
            samples = []
        return Encoded(row.where, row_key(row), samples)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row's samples: none where it was dropped."""

    where: str
    key: bytes
    """What rows of the same content share."""
    samples: list[Sample]


@dataclass(frozen=True)
class Dataset:
    """Encoded rows."""

    name: str
    """The source as a user wrote it."""
    sha256: str
    """Hex hash of the source's bytes."""
    samples: Sequence[Sample]
    keys: dict[bytes, str] = field(default_factory=dict)
    """Key of each distinct row → where it stands."""
    num_rows: int = 0
    """Rows read, those that were dropped among them."""
    num_dropped: int = 0
    """Rows left out because their answer doesn't fit."""

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(sample.ids) for sample in self.samples]

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def num_target_tokens(self) -> int:
        return sum(int(sample.trained.sum()) for sample in self.samples)

    @cached_property
    def num_truncated(self) -> int:
        return sum(sample.truncated for sample in self.samples)

    @property
    def num_repeated(self) -> int:
        """Rows that say the same as one before them."""
        return self.num_rows - len(self.keys)

    def facts(self) -> dict[str, str | int]:
        """What a run's record says of its data."""
        return {
            "path": self.name,
            "sha256": self.sha256,
            "rows": self.num_rows,
            "samples": len(self.samples),
            "tokens": self.num_tokens,
            "target_tokens": self.num_target_tokens,
            "truncated_rows": self.num_truncated,
            "dropped_rows": self.num_dropped,
            "repeated_rows": self.num_repeated,
        }


@dataclass(frozen=True)
class Stream:
    """Rows that are encoded while they are trained on; only the first `POOL_ROWS` are known beforehand."""

    source: Source
    encoding: Encoding
    head: Dataset
    """The first rows."""
    held_out: Mapping[bytes, str] = field(default_factory=dict)
    """Key of each row that must not be trained on → where it stands."""

    @property
    def name(self) -> str:
        """The source as a user wrote it."""
        return self.source.name

    @property
    def keys(self) -> dict[bytes, str]:
        """Key of each distinct row of the first → where it stands."""
        return self.head.keys

    @property
    def sha256(self) -> str:
        """Hex hash over the source's size, beginning and end."""
        return self.head.sha256

    def read(self, start: int) -> Iterator[Encoded]:
        """The rows from `start` on, encoded. Raises DataError at one that is held out."""
        for row in self.encoding.read(self.source, start):
            if row.key in self.held_out:
                raise overlap(self.held_out[row.key], row.where)
            yield row

    def facts(self) -> dict[str, str | int]:
        """What a run's record says of its data: the figures are those of the first rows."""
        return {**self.head.facts(), "streamed": True}


def overlap(held_out: str, trained: str, more: int = 0) -> DataError:
    """The error that a held-out row, and so many more of them, are training rows as well."""
    others = f", and so are {more:,} more" if more else ""
    return DataError(
        f"{held_out}: this held-out row is trained on too, at {trained}{others}: take such rows out of one of the "
        "files, or set data.allow_overlap to true",
        field="data.valid",
    )


def load_dataset(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    format: Format = "auto",
    turns: Turns = "all",
    drop_too_long: bool = False,
) -> Dataset:
    """Reads and encodes a source (see `sources`); `name` may be `example:SET/FILE.jsonl`.

    Raises DataError with source and row, also where no row is left.
    """
    source = open_source(name)
    encoding = Encoding(tokenizer, max_length, format, turns, drop_too_long)
    return collect(source, encoding.read(source), source.digest(False), max_length)


def open_stream(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    format: Format = "auto",
    turns: Turns = "all",
    drop_too_long: bool = False,
) -> Stream:
    """Opens a source to be encoded while it is trained on. Raises DataError for what is wrong with its first rows."""
    source = open_source(name, streaming=True)
    encoding = Encoding(tokenizer, max_length, format, turns, drop_too_long)
    head = collect(source, islice(encoding.read(source), POOL_ROWS), source.digest(True), max_length)
    return Stream(source, encoding, head)


def collect(source: Source, rows: Iterator[Encoded], sha256: str, max_length: int) -> Dataset:
    """Holds encoded rows in memory. Raises DataError where none is left."""
    samples: list[Sample] = []
    keys: dict[bytes, str] = {}
    num_rows = dropped = 0
    for row in rows:
        num_rows += 1
        dropped += not row.samples
        keys.setdefault(row.key, row.where)
        samples += row.samples
    if not samples:
        raise DataError(
            f"{source.name}: no row is left: the answers of all {num_rows} rows are longer than data.max_length "
            f"{max_length}"
        )
    return Dataset(source.name, sha256, samples, keys, num_rows, dropped)
