"""The two ends of the decoder for rows whose adapter has something there.

    input     x = E'[token] + s · A[:, token]ᵀ Bᵀ        E': E with the adapter's own rows for some tokens, or for all
    output    logits = h W'ᵀ, W' likewise; a LoRA of the output embedding comes on top as on any linear layer

Rows of other requests are not touched.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from peftkit_kernels import linear
from peftkit_serve.adapters.memory import Ends, Rows
from peftkit_serve.batch import Span


def embed(
    x_TH: Tensor,
    token_T: Tensor,
    segment_row_X: Tensor,
    spans: Sequence[Span],
    ends: Mapping[int, Ends],
    *,
    deterministic: bool,
) -> Tensor:
    """Puts each row's own embedding into x, in place. ends: by slot; a slot without an entry keeps the base's."""
    for row_X, own in _own(segment_row_X, spans, ends):
        token_X = token_T.index_select(0, row_X)
        x_XH = x_TH.index_select(0, row_X)
        if own.embedding_rows is not None:
            _replace_rows(x_XH, token_X, own.embedding_rows)
        if own.embedding_lora is not None:
            a_VR, b_HR, scale = own.embedding_lora
            x_XH += linear(a_VR.index_select(0, token_X), b_HR, deterministic=deterministic).mul_(scale)
        x_TH.index_copy_(0, row_X, x_XH)
    return x_TH


def replace_logits(
    logits_XV: Tensor,
    hidden_XH: Tensor,
    segment_row_X: Tensor,
    spans: Sequence[Span],
    ends: Mapping[int, Ends],
    *,
    deterministic: bool,
) -> Tensor:
    """Puts the logits of each row's own rows of the output embedding into place."""
    for row_X, own in _own(segment_row_X, spans, ends):
        if own.head_rows is not None:
            weight_YH, token_Y = own.head_rows
            own_XY = linear(hidden_XH.index_select(0, row_X), weight_YH, deterministic=deterministic)
            if token_Y is None:
                logits_XV.index_copy_(0, row_X, own_XY)
            else:
                logits_XV[row_X[:, None], token_Y] = own_XY
    return logits_XV


def _own(segment_row_X: Tensor, spans: Sequence[Span], ends: Mapping[int, Ends]) -> Iterator[tuple[Tensor, Ends]]:
    """Rows and ends of each segment whose slot has some."""
    for slot, start, end in spans:
        if slot in ends:
            yield segment_row_X[start:end], ends[slot]


def _replace_rows(x_XH: Tensor, token_X: Tensor, rows: Rows) -> None:
    weight_YH, token_Y = rows
    if token_Y is None:
        torch.index_select(weight_YH, 0, token_X, out=x_XH)
        return
    is_own_XY = token_X[:, None] == token_Y
    own_XH = weight_YH.index_select(0, is_own_XY.int().argmax(1))  # of how many the host needn't know
    torch.where(is_own_XY.any(1)[:, None], own_XH, x_XH, out=x_XH)
