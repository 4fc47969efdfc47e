"""Scores of a model on rows of a data file.

`score` compares generated answers with the rows' references; who generated them is the caller's affair. `nll` asks the
model itself. A row's reference is its completion, or the last turn of its chat.

    exact_match  the whole greedy answer, up to its end token, is the reference; white space at the ends doesn't count,
                 and two JSON objects are compared as objects
    accuracy     the greedy answer's first tokens, as many as the reference has, are the reference's
    field_f1     micro F1 over the fields of JSON answers: a field counts when name and value are right; an answer that
                 isn't a JSON object has no fields
    rouge_l      mean over rows of the F-measure of the longest common subsequence of words
    nll          mean negative log-likelihood of a reference token, in nats; the end token isn't counted

Every value is a ratio Σ aᵢ / Σ bᵢ over rows, and so is its standard error √Σ(aᵢ − value · bᵢ)² / Σ bᵢ: the binomial one
for exact_match and accuracy, that of a mean for rouge_l, and the linearised one of a ratio for field_f1 and nll.
"""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.chat import end_of_turn
from peftkit.data import ChatRow, InstructionRow, Row, Sample, encode_row, read_rows
from peftkit.data.encode import TooLongError
from peftkit.data.formats import Format
from peftkit.data.sources import Source
from peftkit.errors import DataError

logger = logging.getLogger(__name__)

Metric = Literal["exact_match", "accuracy", "field_f1", "rouge_l", "nll"]
METRICS: tuple[Metric, ...] = get_args(Metric)

ANSWER_MARGIN_TOKENS = 16
"""How far an answer may go on beyond the longest reference."""
_HEAD_ROWS = 512
"""Positions that go through the output layer at a time: their logits over a vocabulary of 128 000 take 0.26 GB."""


@dataclass(frozen=True, slots=True)
class Example:
    """A row to be answered."""

    where: str
    """File and line, for messages."""
    reference: str
    prompt_ids: tuple[int, ...]
    reference_ids: tuple[int, ...]
    """Without the end token."""
    truncated: bool = False
    """The prompt's beginning was cut away."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model generated for an example, greedily."""

    text: str
    """Without the end token."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A metric over some rows."""

    metric: Metric
    value: float
    stderr: float
    """Standard error of `value` over rows like these."""
    n: int
    """Rows."""


def read_examples(
    source: str | Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    limit: int | None = None,
    format: Format = "auto",
    drop_too_long: bool = False,
) -> list[Example]:
    """The first `limit` rows (None: all) of a data source, tokenised as in training; a chat's last turn is the answer,
    a part of a long text counts as a row.

    A source's name may be `example:SET/FILE.jsonl`. Prompts are cut from the left to `max_length` tokens with the
    reference; rows whose reference doesn't fit are an error, or left out with `drop_too_long`. Raises DataError with
    file and line.
    """
    name = source if isinstance(source, str) else source.name
    rows = (_examples(row, tokenizer, max_length, drop_too_long) for row in read_rows(source, format))
    examples = list(islice(chain.from_iterable(rows), None if limit is None else min(limit, sys.maxsize)))
    if num_truncated := sum(example.truncated for example in examples):
        logger.info(
            "%s: %d of %d rows are longer than %d tokens: their prompts' beginnings are cut away",
            name,
            num_truncated,
            len(examples),
            max_length,
        )
    return examples


def max_answer_tokens(examples: Sequence[Example], metrics: Iterable[Metric]) -> list[int]:
    """How many tokens to generate for each example: for accuracy no more than its reference has."""
    if set(metrics) == {"accuracy"}:
        return [len(example.reference_ids) for example in examples]
    longest = max(len(example.reference_ids) for example in examples)
    return [longest + ANSWER_MARGIN_TOKENS] * len(examples)


def score(examples: Sequence[Example], answers: Sequence[Answer], metric: Metric) -> Score:
    """Scores answers, one for each example in the same order. Not for "nll", which isn't about answers.

    Raises DataError when the metric is field_f1 and a reference isn't a JSON object.
    """
    assert metric != "nll" and len(examples) == len(answers)
    compare = _COMPARISONS[metric]
    return _ratio(metric, [compare(example, answer) for example, answer in zip(examples, answers, strict=True)])


@torch.inference_mode()
def nll(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    batch_tokens: int = 4096,
    on_rows: Callable[[int], object] | None = None,
) -> Score:
    """The model's "nll" on the references, with the adapter that is attached to it.

    Rows of like length go together, at most `batch_tokens` with padding; `on_rows` is told how many are done.
    """
    terms: list[tuple[float, float]] = []
    for batch in _batches(examples, batch_tokens):
        terms += [(float(losses.sum()), float(len(losses))) for losses in _reference_losses(model, batch)]
        if on_rows is not None:
            on_rows(len(batch))
    return _ratio("nll", terms)


def _examples(row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int, drop_too_long: bool) -> list[Example]:
    """One example, or as many as a long text has samples; none where the row is dropped."""
    if isinstance(row, ChatRow):
        row = replace(row, untrained=())  # what isn't trained on can be asked all the same
    try:
        samples = encode_row(row, tokenizer, max_length, turns="last")
    except TooLongError:
        if not drop_too_long:
            raise
        samples = []
    return [_example(row, sample, tokenizer) for sample in samples]


def _example(row: Row, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Example:
    ids, trained = sample.ids.tolist(), sample.trained.tolist()
    end = len(trained) - trained[::-1].index(True)
    start = end - trained[:end][::-1].index(False)
    reference_ids = ids[start:end]
    if reference_ids[-1] == end_of_turn(tokenizer):
        reference_ids.pop()
    # a turn is what the template makes of it: calls, a block for thoughts
    rendered = str(tokenizer.decode(reference_ids, skip_special_tokens=True))
    reference = rendered if isinstance(row, (ChatRow, InstructionRow)) else row.reference
    return Example(row.where, reference, tuple(ids[:start]), tuple(reference_ids), sample.truncated)


def _ratio(metric: Metric, terms: Sequence[tuple[float, float]]) -> Score:
    """Σ a / Σ b over (a, b) of each row, with its standard error."""
    whole = max(math.fsum(b for _, b in terms), 1.0)
    value = math.fsum(a for a, _ in terms) / whole
    stderr = math.sqrt(math.fsum((a - value * b) ** 2 for a, b in terms)) / whole
    return Score(metric, value, stderr, len(terms))


def _exact_match(example: Example, answer: Answer) -> tuple[float, float]:
    wanted, found = example.reference.strip(), answer.text.strip()
    same = wanted == found
    if not same and (fields := _fields(wanted)) is not None:
        same = _same(fields, _fields(found))
    return float(same), 1.0


def _accuracy(example: Example, answer: Answer) -> tuple[float, float]:
    return float(answer.token_ids[: len(example.reference_ids)] == example.reference_ids), 1.0


def _field_f1(example: Example, answer: Answer) -> tuple[float, float]:
    """2 · true positives, and fields of reference and answer together: F1 is the ratio of their sums."""
    wanted, found = _fields(example.reference), _fields(answer.text) or {}
    if wanted is None:
        raise DataError(f"{example.where}: field_f1 needs a JSON object as completion: choose another metric")
    right = sum(name in found and _same(found[name], value) for name, value in wanted.items())
    return 2.0 * right, float(len(wanted) + len(found))


def _rouge_l(example: Example, answer: Answer) -> tuple[float, float]:
    wanted, found = example.reference.split(), answer.text.split()
    if not wanted and not found:
        return 1.0, 1.0
    return 2.0 * _common_subsequence(wanted, found) / (len(wanted) + len(found)), 1.0


_COMPARISONS: dict[Metric, Callable[[Example, Answer], tuple[float, float]]] = {
    "exact_match": _exact_match,
    "accuracy": _accuracy,
    "field_f1": _field_f1,
    "rouge_l": _rouge_l,
}


def _fields(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, true and 1 aren't, as they are to Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def _batches(examples: Sequence[Example], batch_tokens: int) -> Iterable[list[Example]]:
    """Examples by falling length, so that the largest batch comes first and memory is known from the start."""
    batch: list[Example] = []
    for example in sorted(examples, key=_length, reverse=True):
        if batch and (len(batch) + 1) * _length(batch[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def _length(example: Example) -> int:
    return len(example.prompt_ids) + len(example.reference_ids)


def _reference_losses(model: PreTrainedModel, batch: Sequence[Example]) -> list[Tensor]:
    """Loss of each reference token of each example, float64 on the CPU; only those positions meet the output layer."""
    width = _length(batch[0])
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    rows, columns, targets = [], [], []
    for row, example in enumerate(batch):
        tokens = [*example.prompt_ids, *example.reference_ids]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        rows += [row] * len(example.reference_ids)
        columns += range(len(example.prompt_ids) - 1, len(tokens) - 1)
        targets += example.reference_ids
    hidden = model.base_model(
        input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False
    ).last_hidden_state[rows, columns]
    head, losses = model.get_output_embeddings(), []
    assert head is not None, "a causal language model has an output layer"
    for piece, wanted in zip(hidden.split(_HEAD_ROWS), torch.tensor(targets).split(_HEAD_ROWS), strict=True):
        losses.append(F.cross_entropy(head(piece).float(), wanted.to(model.device), reduction="none").double().cpu())
    return list(torch.cat(losses).split([len(example.reference_ids) for example in batch]))
