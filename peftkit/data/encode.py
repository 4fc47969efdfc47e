"""Rows → token ids with the trained part marked.

A prompt longer than fits is cut from the left (a leading BOS stays), a longer chat loses its oldest turns, whole, and
a longer text goes on in further samples; what was cut is counted. An answer is never cut: a row whose last answer
doesn't fit is an error.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from peftkit.chat import encode_chat, encode_completion, encode_text, end_of_turn
from peftkit.data.formats import ChatRow, CompletionRow, InstructionRow, Row, TextRow
from peftkit.errors import DataError

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Turns = Literal["all", "last"]


class TooLongError(DataError):
    """A row whose last answer doesn't fit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as the model sees it: both arrays have one entry a token; `trained` is never set at position 0."""

    where: str
    """File and line, for messages."""
    ids: Ids
    trained: Mask
    truncated: bool = False
    """Part of the prompt or the oldest turns were cut away."""


def encode_row(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int, *, turns: Turns = "all") -> list[Sample]:
    """One row as samples of at most `max_length` tokens: one, or several of a long text.

    `turns` says which of the assistant's turns of a chat are trained. Raises DataError.
    """
    if isinstance(row, InstructionRow):
        row = row.as_chat() if tokenizer.chat_template else row.as_completion()
    if isinstance(row, TextRow):
        samples = _encode_text(row, tokenizer, max_length)
    elif isinstance(row, ChatRow):
        samples = [_encode_chat(row, tokenizer, max_length, turns)]
    else:
        samples = [_encode_completion(row, tokenizer, max_length)]
    for sample in samples:
        _check(sample, tokenizer)
    if not isinstance(row, ChatRow):
        assert samples[-1].trained[-1] and samples[-1].ids[-1] == end_of_turn(tokenizer), "an answer trains its end"
    return samples


def _check(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    """What must hold of every sample, however it came about."""
    assert not sample.trained[:1].any(), "nothing comes before the first token"
    if not sample.trained.any():
        raise DataError(f"{sample.where}: no token of this row is trained")
    bos = tokenizer.bos_token_id
    if isinstance(bos, int) and np.any((sample.ids[1:] == bos) & (sample.ids[:-1] == bos)):
        raise DataError(
            f"{sample.where}: two {tokenizer.bos_token!r} (BOS) in a row: take it out of the text, for "
            f"{'the chat template' if tokenizer.chat_template else 'the tokenizer'} writes one"
        )


def _encode_text(row: TextRow, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Sample]:
    ids = np.asarray(encode_text(tokenizer, row.text), dtype=np.int32)
    if len(ids) < 2:
        raise DataError(f"{row.where}: text is a single token: there is nothing to predict")
    samples: list[Sample] = []
    # a piece starts with the last token of the one before, so that every token but the first is predicted once
    for start in range(0, len(ids) - 1, max_length - 1):
        piece = ids[start : start + max_length]
        samples.append(Sample(row.where, piece, np.arange(len(piece)) > 0))
    return samples


def _encode_completion(row: CompletionRow, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Sample:
    ids, num_prompt = encode_completion(tokenizer, row.prompt, row.completion)
    num_completion = len(ids) - num_prompt
    if num_prompt == 0:
        raise DataError(f"{row.where}: prompt is empty: the completion's first token has nothing to follow")
    if num_completion >= max_length:
        raise TooLongError(
            f"{row.where}: the completion is {num_completion} tokens and would be cut away: "
            f"set data.max_length to {num_completion + 1} or more, shorten it, or set data.too_long to drop"
        )
    cut = max(len(ids) - max_length, 0)
    if cut:
        keep = 1 if num_prompt > cut and ids[0] == tokenizer.bos_token_id else 0
        ids = ids[:keep] + ids[keep + cut :]
        num_prompt -= cut
    trained = np.arange(len(ids)) >= num_prompt
    return Sample(row.where, np.asarray(ids, dtype=np.int32), trained, truncated=cut > 0)


def _encode_chat(row: ChatRow, tokenizer: PreTrainedTokenizerBase, max_length: int, turns: Turns) -> Sample:
    messages = list(row.messages)
    answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    chosen = [i for i in (answers[-1:] if turns == "last" else answers) if i not in row.untrained]
    if not chosen:
        raise DataError(
            f"{row.where}: messages: the last answer says that it isn't to be trained, and by turns last no other is: "
            "set data.turns to all, or leave the row out"
        )
    first = 1 if messages[0]["role"] == "system" else 0
    starts = [first, *(i for i, turn in enumerate(messages) if i > first and turn["role"] == "user")]
    length = 0
    for start in starts:
        kept = messages[:first] + messages[start:]
        left = [i - start + first for i in chosen if i >= start]
        if not left:
            break
        try:
            ids, trained = encode_chat(tokenizer, kept, tools=row.tools, turns=left)
        except DataError as error:
            raise DataError(f"{row.where}: {error}", field=error.field) from error
        length = len(ids)
        if length <= max_length:
            mask = np.asarray(trained, dtype=np.bool_)
            _check_ends(row, ids, mask, len(left), end_of_turn(tokenizer))
            return Sample(row.where, np.asarray(ids, dtype=np.int32), mask, truncated=start > first)
    raise TooLongError(
        f"{row.where}: the last exchange alone is {length} tokens and would be cut away: "
        f"set data.max_length to {length} or more, shorten it, or set data.too_long to drop"
    )


def _check_ends(row: ChatRow, ids: list[int], trained: Mask, num_turns: int, end: int) -> None:
    """Every trained turn brings a trained end of turn."""
    found = int((trained & (np.asarray(ids) == end)).sum())
    if found < num_turns:
        raise DataError(f"{row.where}: {num_turns} turns are trained, but only {found} of their ends are")
