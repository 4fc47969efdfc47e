"""Cases of paged attention, beside SDPA on the same dense problem and vLLM's Triton attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import peftkit_kernels as ops
from peftkit_bench.kernels.case import Case, Floor, Goal, NotInstalled, Work, num_sets, share_of_floor
from peftkit_bench.timing import Call

HEADS = {"8B": (32, 8), "1.5B": (12, 2)}
"""Model → query heads, KV heads; all of size 128."""
_HEAD, _PAGE = 128, 16
_DECODE = (
    ("8B", 1, 8192, 0.6),
    ("8B", 8, 2048, None),
    ("8B", 64, 1024, None),
    ("8B", 64, 4096, 0.85),
    ("8B", 256, 1024, None),
)
_PREFILL = (
    ("8B", 1, 2048, 2048),
    ("8B", 1, 8192, 8192),
    ("8B", 4, 2048, 2048),
    ("8B", 4, 512, 4096),
    ("1.5B", 4, 2048, 2048),
)
_PREFILL_SHARE = 0.75
_SEGMENTS, _GRID = 16, 128
"""vLLM's shares of a row, and the programs below which it takes them: constants of its backend."""


@dataclass(frozen=True)
class Shape:
    """Requests that are all alike."""

    num_q: int
    num_kv: int
    requests: int
    new: int
    """New rows of each."""
    context: int
    """Positions of each, the new ones included."""

    @property
    def floor(self) -> Floor:
        rows = self.requests * self.new
        kv = 4 * self.requests * self.context * self.num_kv * _HEAD
        pairs = self.requests * (self.new * (self.context - self.new) + self.new * (self.new + 1) / 2)
        return Floor(kv + 4 * rows * self.num_q * _HEAD, 4 * pairs * self.num_q * _HEAD)


def cases() -> Iterator[Case]:
    """Decode, then prefill."""
    for model, requests, context, share in (*_DECODE, ("1.5B", 64, 4096, None)):
        shape = Shape(*HEADS[model], requests, 1, context)
        sizes = {"model": model, "requests": requests, "context": context}
        goal = None if share is None else share_of_floor(shape.floor, share)
        prepare = partial(_prepare, shape)
        quick = share is not None
        yield Case("paged_attention decode", sizes, shape.floor, goal, prepare, ("attention", "decode"), quick)
    for model, requests, new, context in _PREFILL:
        shape = Shape(*HEADS[model], requests, new, context)
        sizes = {"model": model, "requests": requests, "new": new, "context": context}
        goal = Goal(f"{_PREFILL_SHARE:.0%} of SDPA's rate", share_of=("sdpa", _PREFILL_SHARE))
        prepare = partial(_prepare, shape)
        quick = model == "8B" and new in (8192, 512)
        yield Case("paged_attention prefill", sizes, shape.floor, goal, prepare, ("attention", "prefill"), quick)


def _prepare(shape: Shape) -> Work:
    """Each set has its own pages, in random order, in one tensor."""
    pages = shape.context // _PAGE
    set_bytes = 4 * shape.requests * shape.context * shape.num_kv * _HEAD
    sets = num_sets(set_bytes, most=16)
    kv = torch.randn(sets * shape.requests * pages, _PAGE, 2, shape.num_kv, _HEAD, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(kv.shape[0], device="cuda").int().view(sets, shape.requests, pages).unbind()
    q = torch.randn(shape.requests * shape.new, shape.num_q, _HEAD, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.arange(shape.requests + 1, device="cuda", dtype=torch.int32) * shape.new
    context = torch.full((shape.requests,), shape.context, device="cuda", dtype=torch.int32)
    rest = (cu_seqlens, context, torch.zeros_like(context))
    ours = [partial(ops.paged_attention, q, kv, table, *rest, scale=_HEAD**-0.5) for table in tables]
    peers = {
        "sdpa": partial(_sdpa, shape, q, min(sets, 8)),
        "vllm": partial(_vllm, shape, q, kv, tables, cu_seqlens, context),
    }
    return Work(ours, peers)


def _sdpa(shape: Shape, q: Tensor, sets: int) -> Sequence[Call]:
    """PyTorch's own attention on keys and values that lie densely."""
    q_NQTD = q.view(shape.requests, shape.new, shape.num_q, _HEAD).transpose(1, 2)
    whole = shape.new == shape.context
    mask = None if whole or shape.new == 1 else causal_lower_right(shape.new, shape.context)
    calls = []
    for _ in range(sets):
        size = (shape.requests, shape.num_kv, shape.context, _HEAD)
        k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        calls.append(
            partial(
                F.scaled_dot_product_attention, q_NQTD, k, v, attn_mask=mask,
                is_causal=whole, scale=_HEAD**-0.5, enable_gqa=True,
            )
        )  # fmt: skip
    return calls


def _vllm(
    shape: Shape, q: Tensor, kv: Tensor, tables: Sequence[Tensor], cu_seqlens: Tensor, context: Tensor
) -> Sequence[Call]:
    """vLLM's unified attention on the same pages, as its Triton backend calls it."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise NotInstalled(f"vllm ({error})") from None
    k, v = kv.unbind(2)
    threshold = _GRID // shape.num_kv
    part = (threshold, shape.num_q, _SEGMENTS)
    output = torch.empty(*part, _HEAD, device="cuda")
    maxima, sums = torch.empty(part, device="cuda"), torch.empty(part, device="cuda")
    out = torch.empty_like(q)
    return [
        partial(
            unified_attention, q=q, k=k, v=v, out=out, cu_seqlens_q=cu_seqlens, max_seqlen_q=shape.new,
            seqused_k=context, max_seqlen_k=shape.context, softmax_scale=_HEAD**-0.5, causal=True,
            window_size=(-1, -1), block_table=table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
            seq_threshold_3D=threshold, num_par_softmax_segments=_SEGMENTS, softmax_segm_output=output,
            softmax_segm_max=maxima, softmax_segm_expsum=sums,
        )
        for table in tables
    ]  # fmt: skip
