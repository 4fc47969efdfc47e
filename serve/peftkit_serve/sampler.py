"""Logits → tokens, each row by its own request's parameters, seed and step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peftkit_kernels import sample
from peftkit_serve.plan import Sample


def draw(logits_NV: Tensor, samples: Sequence[Sample]) -> list[int]:
    """Draws a token for each row. -1 for a row whose logits are not finite: its adapter overflowed.

    A row's token depends on its logits, parameters, seed and step alone, not on the rows beside it.
    """
    device = logits_NV.device
    params = [one.params for one in samples]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return sample(
        logits_NV,
        column([one.temperature for one in params], torch.float32),
        column([one.top_k for one in params], torch.int32),
        column([one.top_p for one in params], torch.float32),
        column([one.min_p for one in params], torch.float32),
        column([_signed(one.seed) for one in samples], torch.int64),
        column([one.step for one in samples], torch.int64),
    ).tolist()


def _signed(seed: int) -> int:
    """Any integer seed as the 64-bit one that is equal to it modulo 2⁶⁴."""
    return (seed + 2**63) % 2**64 - 2**63
