"""Rows → token ids with the trained part marked.

A prompt longer than fits is cut from the left (a leading BOS stays), a longer chat loses its oldest turns, whole; what
was cut is counted. What is trained is never cut: a row whose completion doesn't fit is an error.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from peftkit import resources
from peftkit.chat import encode_chat, encode_completion
from peftkit.data.formats import ChatRow, CompletionRow, Format, Row, read_rows
from peftkit.errors import DataError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as the model sees it: both arrays have one entry a token; `trained` is never set at position 0."""

    where: str
    """File and line, for messages."""
    ids: Ids
    trained: Mask
    truncated: bool = False
    """Part of the prompt or the oldest turns were cut away."""


@dataclass(frozen=True)
class Dataset:
    """A data file, encoded."""

    name: str
    """The path as a user wrote it."""
    sha256: str
    """Hex hash of the file's bytes."""
    samples: Sequence[Sample]

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

    def facts(self) -> dict[str, str | int]:
        """What a run's record says of its data."""
        return {
            "path": self.name,
            "sha256": self.sha256,
            "rows": len(self.samples),
            "tokens": self.num_tokens,
            "target_tokens": self.num_target_tokens,
            "truncated_rows": self.num_truncated,
        }


def load_dataset(name: str, tokenizer: PreTrainedTokenizerBase, *, format: Format = "auto", max_length: int) -> Dataset:
    """Reads and encodes a JSONL file; `name` may be `example:SET/FILE.jsonl`. Raises DataError with file and line."""
    path = resources.find(name)
    samples = [encode_row(row, tokenizer, max_length) for row in read_rows(path, format, name=name)]
    return Dataset(name=name, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), samples=samples)


def encode_row(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Sample:
    """One row as ids with its trained part marked, at most `max_length` tokens. Raises DataError."""
    if isinstance(row, ChatRow):
        return _encode_chat(row, tokenizer, max_length)
    return _encode_completion(row, tokenizer, max_length)


def _encode_completion(row: CompletionRow, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Sample:
    ids, num_prompt = encode_completion(tokenizer, row.prompt, row.completion)
    num_completion = len(ids) - num_prompt
    if num_prompt == 0:
        raise DataError(f"{row.where}: prompt is empty: the completion's first token has nothing to follow")
    if num_completion >= max_length:
        raise DataError(
            f"{row.where}: the completion is {num_completion} tokens and would be cut away: "
            f"set data.max_length to {num_completion + 1} or more, or shorten it"
        )
    cut = max(len(ids) - max_length, 0)
    if cut:
        keep = 1 if num_prompt > cut and ids[0] == tokenizer.bos_token_id else 0
        ids = ids[:keep] + ids[keep + cut :]
        num_prompt -= cut
    trained = np.arange(len(ids)) >= num_prompt
    return Sample(row.where, np.asarray(ids, dtype=np.int32), trained, truncated=cut > 0)


def _encode_chat(row: ChatRow, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Sample:
    messages = list(row.messages)
    head = [turn for turn in messages[:1] if turn["role"] == "system"]
    turns = messages[len(head) :]
    starts = [0, *(i for i, turn in enumerate(turns) if i and turn["role"] == "user")]
    length = 0
    for start in starts:
        try:
            ids, trained = encode_chat(tokenizer, head + turns[start:])
        except DataError as error:
            raise DataError(f"{row.where}: {error}", field=error.field) from error
        length = len(ids)
        if length <= max_length:
            mask = np.asarray(trained, dtype=np.bool_)
            return Sample(row.where, np.asarray(ids, dtype=np.int32), mask, truncated=start > 0)
    raise DataError(
        f"{row.where}: the last exchange alone is {length} tokens and would be cut away: "
        f"set data.max_length to {length} or more, or shorten it"
    )
