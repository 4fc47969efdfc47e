"""Logits → tokens and their log-probabilities, each row by its own request's parameters, seed and step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peftkit_kernels import sample
from peftkit_serve.plan import Sample
from peftkit_serve.request import TokenLogprobs


class Draws(NamedTuple):
    """What rows are drawn by, one entry a row; the argument order of `sample`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor


def draw(logits_NV: Tensor, samples: Sequence[Sample]) -> list[int]:
    """Draws a token for each row. -1 for a row whose logits are not finite: its adapter overflowed.

    A row's token depends on its logits, parameters, seed, step, history and constraint alone, not on the rows beside
    it. `logits_NV` keeps its values.
    """
    device = logits_NV.device
    params = [one.params for one in samples]
    adjusted = [row for row, one in enumerate(samples) if _is_adjusted(one)]
    if adjusted:
        logits_NV = logits_NV.clone()
        for row in adjusted:
            _adjust_(logits_NV[row], samples[row])

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return sample(
        logits_NV,
        column([one.temperature for one in params], torch.float32),
        column([one.top_k for one in params], torch.int32),
        column([one.top_p for one in params], torch.float32),
        column([one.min_p for one in params], torch.float32),
        column([signed(one.seed) for one in samples], torch.int64),
        column([one.step for one in samples], torch.int64),
    ).tolist()


def logprobs(logits_NV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row, the log-probability of a token and those of the `num_top` likeliest, by the logits as they are."""
    if not token_ids:
        return []
    logprob_NV = logits_NV.float().log_softmax(-1)
    chosen = logprob_NV.gather(1, torch.tensor(token_ids, device=logits_NV.device)[:, None])[:, 0].tolist()
    values, ids = logprob_NV.topk(min(max(num_top), logits_NV.shape[1]))
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token, value, (top_ids, top_values), count in zip(token_ids, chosen, tops, num_top, strict=True)
    ]


def is_plain(one: Sample) -> bool:
    """Whether a row asks for no more than a draw from its logits as they are."""
    return not _is_adjusted(one) and one.params.logprobs is None


def _is_adjusted(one: Sample) -> bool:
    return one.constraint is not None or bool(one.params.logit_bias) or one.params.has_penalties


def _adjust_(logits_V: Tensor, one: Sample) -> None:
    """Bias, penalties and the constraint's mask, in this order, on a row in place."""
    params, device = one.params, logits_V.device
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits_V.index_add_(0, torch.tensor(ids, device=device), torch.tensor(biases, device=device).to(logits_V.dtype))
    if params.repetition_penalty != 1.0:
        seen_X = torch.tensor(sorted(set(one.history)), device=device)
        values_X = logits_V[seen_X]
        divided = torch.where(values_X > 0, values_X / params.repetition_penalty, values_X * params.repetition_penalty)
        logits_V[seen_X] = divided
    if one.step and (params.presence_penalty or params.frequency_penalty):
        generated = torch.tensor(one.history[-one.step :], device=device)
        seen_X, count_X = generated.unique(return_counts=True)
        logits_V[seen_X] -= params.presence_penalty + params.frequency_penalty * count_X.to(logits_V.dtype)
    if one.constraint is not None:
        bits = torch.frombuffer(bytearray(one.constraint.allowed()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: len(logits_V)].bool()
        logits_V.masked_fill_(~allowed.to(device), float("-inf"))


def signed(seed: int) -> int:
    """Any integer seed as the 64-bit one that is equal to it modulo 2⁶⁴."""
    return (seed + 2**63) % 2**64 - 2**63
