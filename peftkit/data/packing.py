"""Several samples in one row, which saves the padding.

    row        [ sample 0 | sample 1 | sample 2 | padding ]
    segments     0 0 0 0    1 1 1      2 2 2 2 2  −1 −1
    positions    0 1 2 3    0 1 2      0 1 2 3 4   0  0

A token attends to earlier tokens of its own segment alone (a block-diagonal mask), so that each sample's loss is what
it is by itself. B rows, T tokens a row.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

MASKED = ("sdpa", "eager", "peftkit_rows", "peftkit_prefix")
"""Attention implementations that take a mask of their caller's."""
PADDING = -1
"""Segment of padding."""


def fill_rows(samples: Sequence[int], lengths: Sequence[int], width: int) -> list[list[int]]:
    """Lays samples into rows of at most `width` tokens: the longest first, each where it leaves the least room.

    A sample longer than `width` has a row of its own.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), rising
    for sample in sorted(samples, key=lambda sample: -lengths[sample]):
        place = bisect_left(room, (lengths[sample], -1))
        left, row = room.pop(place) if place < len(room) else (width, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (max(left - lengths[sample], 0), row))
    return rows


def block_mask(segments_BT: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    """Who sees whom, (B, 1, T, T): true or 0 where token i (third axis) sees token j (fourth), of the kind that the
    model's attention takes: booleans, or for "eager" numbers of `dtype` to be added.

    Padding sees earlier padding, so that no row of the mask is empty.
    """
    assert attention in MASKED, attention
    T = segments_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=segments_BT.device).tril()
    seen_B1TT = ((segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT)[:, None]
    if attention != "eager":
        return seen_B1TT
    return torch.zeros(seen_B1TT.shape, dtype=dtype, device=seen_B1TT.device).masked_fill(
        ~seen_B1TT, torch.finfo(dtype).min
    )


def why_not(model: PreTrainedModel, max_length: int) -> str | None:
    """Why rows can't be packed for this model, with the adapter that is on it; None where they can.

    The model is asked, not its name: another first sample must not change what it computes for a second one.
    """
    attention = str(getattr(model.config, "_attn_implementation", None))
    if attention not in MASKED:
        return f"attention '{attention}' takes no mask, so packed rows would see each other: use sdpa or eager"
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < max_length:
        return f"this base's attention sees {window} tokens back, which a mask of packed rows would undo"
    apart = _keeps_apart(model, attention)
    return None if apart else "this base's layers carry one packed row over into the next"


@torch.no_grad()
def _keeps_apart(model: PreTrainedModel, attention: str) -> bool:
    device, vocabulary = model.device, int(model.config.vocab_size)
    ids = torch.arange(8, device=device)[None] * 7 % vocabulary
    other = torch.cat([(ids[:, :4] + 3) % vocabulary, ids[:, 4:]], 1)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=device)
    training = model.training
    model.eval()
    try:
        first, second = (
            model.base_model(
                input_ids=tokens,
                attention_mask=block_mask(segments, attention, model.dtype),
                position_ids=torch.arange(4, device=device).repeat(2)[None],
                use_cache=False,
            ).last_hidden_state[:, 4:]
            for tokens in (ids, other)
        )
    finally:
        model.train(training)
    return bool(torch.isfinite(first).all()) and torch.allclose(first, second, rtol=1e-4, atol=1e-6)
