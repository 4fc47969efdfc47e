"""Logits → tokens and their log-probabilities, each row by its own request's parameters, seed and step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftkit_kernels import sample
from peftkit_serve.adjust import Late, adjusted, is_adjusted
from peftkit_serve.plan import Sample
from peftkit_serve.request import TokenLogprobs
from peftkit_serve.staging import moved


class Draws(NamedTuple):
    """What rows are drawn by, one entry a row; the argument order of `sample`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor


def draw(logits_NV: Tensor, samples: Sequence[Sample], late: Late | None = None) -> Tensor:
    """Draws a token for each row: int64, on the logits' device. -1 for a row whose logits are not finite: its adapter
    overflowed.

    A row's token depends on its logits, parameters, seed, step, history and constraint alone, not on the rows beside
    it. `logits_NV` keeps its values. late: see `adjusted`.
    """
    if any(is_adjusted(one) for one in samples):
        logits_NV = adjusted(logits_NV, samples, late)
    fields = lay_out_draws(samples)
    draws = Draws(*(moved(torch.from_numpy(fields[name]), logits_NV.device) for name in Draws._fields))
    return sample(logits_NV, *draws)


def lay_out_draws(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    """The fields of `Draws`, an entry a sample."""
    params = [one.params for one in samples]
    return {
        "temperature": np.array([one.temperature for one in params], np.float32),
        "top_k": np.array([one.top_k for one in params], np.int32),
        "top_p": np.array([one.top_p for one in params], np.float32),
        "min_p": np.array([one.min_p for one in params], np.float32),
        "seed": np.array([signed(one.seed) for one in samples], np.int64),
        "step": np.array([one.step for one in samples], np.int64),
    }


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
    return not is_adjusted(one) and one.params.logprobs is None


def signed(seed: int) -> int:
    """Any integer seed as the 64-bit one that is equal to it modulo 2⁶⁴."""
    return (seed + 2**63) % 2**64 - 2**63
