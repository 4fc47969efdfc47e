"""Causal attention over rows whose sequences are known by their bounds: no token sees another sequence, and no mask of
tokens by tokens is made.

    rows      [ sequence 0 | sequence 1 | padding ] [ sequence 2 ]
    bounds     0            4            9         12            16          over the tokens of all rows, end to end

`bounded` gives a trunk's arguments where its attention can go by bounds: on a GPU in 16 bits, through flash attention
for variable lengths, or, where each row is one whole sequence, whatever torch finds quickest for causal attention. Else
there is a mask (`peftkit.data.block_mask`). Queries may have more heads than keys, which are not repeated.
B rows, T tokens of a row, N tokens in all, S sequences, Q query heads, K key heads, D head size, V virtual tokens.
"""

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from peftkit.methods.method import attached
from peftkit.methods.soft_prompt import SoftPrompt

logger = logging.getLogger(__name__)

ATTENTION = "peftkit_rows"
"""The attention implementation that goes by bounds where it is given them, and as sdpa does elsewhere."""
BY_BOUNDS = frozenset({ATTENTION, "peftkit_prefix"})
DEVICES = frozenset({"cuda"})
_DTYPES = frozenset({torch.bfloat16, torch.float16})
_MOST_HEAD = 256


def attend_by_bounds(model: PreTrainedModel) -> None:
    """Lets a model whose attention is sdpa go by bounds where it can."""
    if model.config._attn_implementation == "sdpa" and model.device.type in DEVICES:
        model.config._attn_implementation = ATTENTION


def bounded(model: PreTrainedModel, num_rows: int, bounds_S: Tensor | None, longest: int) -> dict[str, Any]:
    """Arguments of a trunk for rows with these bounds, int32 (S + 1,), and so many tokens in the longest sequence.

    None where its attention needs a mask, which is logged once.
    """
    if bounds_S is None or model.device.type not in DEVICES:
        return {}
    reason = why_masked(model, longest)
    if reason is not None:
        _say(reason)
        return {}
    # an empty mask goes through a model's own making of masks as it is
    nothing = torch.empty(num_rows, 1, 0, 0, dtype=torch.bool, device=bounds_S.device)
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {"attention_mask": nothing, "cu_seq_lens_q": bounds_S, "cu_seq_lens_k": bounds_S, **lengths}


def why_masked(model: PreTrainedModel, longest: int) -> str | None:
    """What keeps attention from going by the bounds of sequences, the longest of so many tokens, if anything does."""
    config = model.config
    if config._attn_implementation not in BY_BOUNDS or model.device.type not in DEVICES:
        return f"it is {config._attn_implementation} on {model.device.type}"
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    if model.device.type == "cuda" and not _has_flash(model.device):
        return "this GPU, or torch's build, has no flash attention"
    if model.dtype not in _DTYPES:
        return f"flash attention computes in 16 bits, not in {model.dtype}"
    if head > _MOST_HEAD or head % 8:
        return f"flash attention has no heads of {head}"
    if window is not None and window < longest:
        return f"this base's attention sees {window} tokens back"
    if getattr(config, "attention_dropout", 0.0):
        return "this base drops out attention"
    if any(isinstance(method, SoftPrompt) for method in attached(model)):
        return "virtual tokens stand in front of each row"
    return None


def _has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _say(reason: str) -> None:
    logger.info("attention goes by a mask, not by the bounds of sequences: %s", reason)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of query (B, Q, T, D) over key and value (B, K, T, D): (B, T, Q, D), and no weights."""
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    (B, Q, T, _), K = query.shape, key.shape[1]
    if (len(cu_seq_lens_q) - 1, max_length_q) == (B, T):  # each row is one sequence
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=Q != K)
        return output.transpose(1, 2), None
    q_NQD, k_NKD, v_NKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output_NQD = over_sequences(q_NQD, k_NKD, v_NKD, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scaling)
    return output_NQD.view(B, T, Q, -1), None


def over_sequences(
    query_NQD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    bounds_q_S: Tensor,
    bounds_k_S: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
) -> Tensor:
    """Attention (N, Q, D) of each sequence over its own keys. A sequence's last query sees all of them, the one before
    all but the last: keys that queries are fewer than come in front."""
    if query_NQD.device.type == "cuda":
        # its arguments: no dropout, causal, no mask to look at; its second result is the log-sum-exp
        output, *_ = torch.ops.aten._flash_attention_forward(
            query_NQD, key_MKD, value_MKD, bounds_q_S, bounds_k_S, longest_q, longest_k, 0.0, True, False, scale=scale
        )
        return output
    queries, keys, values = (
        x.tensor_split(bounds[1:-1].tolist())
        for x, bounds in ((query_NQD, bounds_q_S), (key_MKD, bounds_k_S), (value_MKD, bounds_k_S))
    )
    return torch.cat([_one(*each, scale) for each in zip(queries, keys, values, strict=True)])


def _one(query_NQD: Tensor, key_MKD: Tensor, value_MKD: Tensor, scale: float | None) -> Tensor:
    N, M = len(query_NQD), len(key_MKD)
    seen_NM = torch.ones(N, M, dtype=torch.bool, device=query_NQD.device).tril(M - N)
    heads = (x.transpose(0, 1)[None] for x in (query_NQD, key_MKD, value_MKD))
    gqa = query_NQD.shape[1] != key_MKD.shape[1]
    return F.scaled_dot_product_attention(*heads, attn_mask=seen_NM, scale=scale, enable_gqa=gqa)[0].transpose(0, 1)


class InFront:
    """The places of V virtual tokens in front of each sequence."""

    def __init__(self, bounds_S: Tensor, num_virtual: int, num_tokens: int) -> None:
        S = len(bounds_S) - 1
        self.bounds_S = bounds_S + num_virtual * torch.arange(S + 1, dtype=torch.int32, device=bounds_S.device)
        self._num_sequences = S
        place_M = torch.arange(num_tokens + S * num_virtual, dtype=torch.int32, device=bounds_S.device)
        sequence_M = torch.bucketize(place_M, self.bounds_S[1:], right=True)
        within_M = place_M - self.bounds_S[sequence_M]
        virtual_M = sequence_M * num_virtual + within_M
        text_M = S * num_virtual + bounds_S[sequence_M] + within_M - num_virtual
        self._order_M = torch.where(within_M < num_virtual, virtual_M, text_M)

    def put(self, virtual_VKD: Tensor, text_NKD: Tensor) -> Tensor:
        """The sequences (N + S V, K, D), each with the virtual tokens in front."""
        repeated = virtual_VKD.expand(self._num_sequences, *virtual_VKD.shape).flatten(0, 1)
        return torch.cat([repeated, text_NKD]).index_select(0, self._order_M)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
