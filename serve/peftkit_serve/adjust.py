"""What rows' logits are changed by before they are drawn from: biases, penalties, and what a schema allows.

All rows at once: what the host knows goes to the device in a few copies, for which nobody waits, and a row's last token
is taken where the step before has left it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peftkit_serve.plan import Sample
from peftkit_serve.staging import moved


class Late(NamedTuple):
    """Last tokens that only the device knows."""

    rows: tuple[int, ...]
    """Of the logits, ascending."""
    token_L: Tensor
    """int64, on the device."""


def is_adjusted(one: Sample) -> bool:
    """Whether a row is drawn from other logits than its own."""
    return one.constraint is not None or bool(one.params.logit_bias) or one.params.has_penalties


def adjusted(logits_NV: Tensor, samples: Sequence[Sample], late: Late | None = None) -> Tensor:
    """A copy of the logits with bias, penalties and the constraint's mask, in this order.

    late: rows whose `history` lacks the last token, which is one of those they generated.
    """
    logits_NV = logits_NV.clone(memory_format=torch.contiguous_format)
    _add_biases_(logits_NV, [(row, one) for row, one in enumerate(samples) if one.params.logit_bias])
    penalised = [(row, one) for row, one in enumerate(samples) if one.params.has_penalties]
    if penalised:
        _add_penalties_(logits_NV, penalised, late)
    constrained = [(row, one) for row, one in enumerate(samples) if one.constraint is not None]
    if constrained:
        _mask_(logits_NV, constrained)
    return logits_NV


def _add_biases_(logits_NV: Tensor, biased: Sequence[tuple[int, Sample]]) -> None:
    vocab = logits_NV.shape[1]
    pairs = [(row * vocab + token, bias) for row, one in biased for token, bias in one.params.logit_bias]
    if pairs:
        places, biases = zip(*pairs, strict=True)
        at_X = moved(torch.tensor(places), logits_NV.device)
        bias_X = moved(torch.tensor(biases, dtype=torch.float32), logits_NV.device).to(logits_NV.dtype)
        logits_NV.view(-1).index_add_(0, at_X, bias_X)  # a token has one bias, so no place comes twice


def _add_penalties_(logits_NV: Tensor, penalised: Sequence[tuple[int, Sample]], late: Late | None) -> None:
    """Every token of a history takes its new logit to its place; one that comes again takes the same."""
    vocab, device = logits_NV.shape[1], logits_NV.device
    late_rows = () if late is None else late.rows
    numbers = {row: number for number, (row, _) in enumerate(penalised)}
    known = [np.asarray(one.history, np.int64) for _, one in penalised]
    lengths = np.array([len(tokens) for tokens in known])
    generated = np.array([one.step - (row in late_rows) for row, one in penalised])
    number_X = np.repeat(np.arange(len(known)), lengths)
    within_X = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    late_numbers = np.array([numbers[row] for row in late_rows], np.int64)
    places = np.concatenate((number_X, late_numbers))
    counted = np.concatenate((within_X >= (lengths - generated)[number_X], np.ones(len(late_numbers), np.bool_)))
    rows = np.array([row for row, _ in penalised])[places]
    token_X = np.concatenate((*known, np.zeros(len(late_numbers), np.int64)))
    number_X, row_X, counted_X, token_X = moved(
        torch.from_numpy(np.stack((places, rows, counted.astype(np.int64), token_X))), device
    ).unbind(0)
    if late is not None:
        token_X[len(token_X) - len(late.rows) :] = late.token_L
    count = torch.zeros(len(penalised) * vocab, dtype=torch.int32, device=device)
    count_X = count.scatter_add_(0, number_X * vocab + token_X, counted_X.int())[number_X * vocab + token_X]
    params = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (s.params for _, s in penalised)]
    repetition_X, presence_X, frequency_X = moved(torch.tensor(params), device)[number_X].unbind(1)
    at_X, flat = row_X * vocab + token_X, logits_NV.view(-1)
    value_X = flat[at_X].to(torch.promote_types(logits_NV.dtype, torch.float32))
    value_X = torch.where(value_X > 0, value_X / repetition_X, value_X * repetition_X)
    value_X -= presence_X * (count_X > 0) + frequency_X * count_X
    flat[at_X] = value_X.to(logits_NV.dtype)


def _mask_(logits_NV: Tensor, constrained: Sequence[tuple[int, Sample]]) -> None:
    vocab, device = logits_NV.shape[1], logits_NV.device
    allowed = b"".join(one.constraint.allowed() for _, one in constrained if one.constraint is not None)
    bits = torch.frombuffer(bytearray(allowed), dtype=torch.uint8).view(len(constrained), -1)
    bit_CB8 = moved(bits, device)[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    forbidden_CV = bit_CB8.flatten(1)[:, :vocab] == 0
    row_C = moved(torch.tensor([row for row, _ in constrained]), device)
    logits_NV[row_C] = logits_NV[row_C].masked_fill_(forbidden_CV, float("-inf"))
