"""Rotation of queries and keys for training and its transpose: memory-bound, one launch for both."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen

_ROWS, _HEADS, _NUM_WARPS = 2, 8, 4  # of a program: a 16-byte load of each half, cosine and sine a thread


def rotate(
    q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """See `peftkit_kernels.training_steps.rotate`."""
    q_NQD, k_NKD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_NQD, k_NKD))
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_NQD, k_NKD))
    num_rows, num_q, head_size = q_NQD.shape
    constants = _constants(num_q, k_NKD.shape[1], head_size, inverse)
    if num_rows:
        _rotate[(-(-num_rows // _ROWS) * (constants["Q_BLOCKS"] + constants["K_BLOCKS"]),)](
            q_NQD,
            k_NKD,
            cos_ND.contiguous(),
            sin_ND.contiguous(),
            out_q,
            out_k,
            num_rows,
            q_NQD.stride(0),
            q_NQD.stride(1),
            k_NKD.stride(0),
            k_NKD.stride(1),
            **constants,
            num_warps=_NUM_WARPS,
        )
    return out_q, out_k


@triton.jit(do_not_specialize=["num_rows"])
def _rotate(
    q, k, cos, sin, out_q, out_k, num_rows, q_row, q_head, k_row, k_head,
    NUM_Q: tl.constexpr, NUM_K: tl.constexpr, Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """A program has ROWS rows of HEADS queries, or of HEADS keys."""
    lines = tl.arange(0, ROWS * HEADS)
    block = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS)
    row = (tl.program_id(0) // (Q_BLOCKS + K_BLOCKS)).to(tl.int64) * ROWS + lines // HEADS
    if block < Q_BLOCKS:
        head = block * HEADS + lines % HEADS
        _turn(q, cos, sin, out_q, row, head, num_rows, q_row, q_head, NUM_Q, HALF, BLOCK_E, INVERSE)
    else:
        head = (block - Q_BLOCKS) * HEADS + lines % HEADS
        _turn(k, cos, sin, out_k, row, head, num_rows, k_row, k_head, NUM_K, HALF, BLOCK_E, INVERSE)


@triton.jit
def _turn(
    x, cos, sin, out, row, head, num_rows, x_row, x_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_E: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    live = ((row < num_rows) & (head < NUM_HEADS))[:, None] & (offs_e < HALF)
    at = x + (row * x_row + head * x_head)[:, None] + offs_e
    first = tl.load(at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    at_angle = (row * (2 * HALF))[:, None] + offs_e
    cos_first = tl.load(cos + at_angle, mask=live, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + at_angle + HALF, mask=live, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + at_angle, mask=live, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + at_angle + HALF, mask=live, other=0.0).to(tl.float32)
    if INVERSE:
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second
    at_out = out + (row * (NUM_HEADS * 2 * HALF) + head * (2 * HALF))[:, None] + offs_e
    tl.store(at_out, turned_first.to(out.dtype.element_ty), mask=live)
    tl.store(at_out + HALF, turned_second.to(out.dtype.element_ty), mask=live)


def specimens() -> Iterator[Specimen]:
    """Some models' heads, both ways."""
    for dtype, num_q, num_k, size, inverse in (
        ("*bf16", 32, 8, 128, False),
        ("*bf16", 32, 8, 128, True),
        ("*fp16", 12, 2, 128, False),
        ("*bf16", 9, 3, 64, True),
    ):
        constants = _constants(num_q, num_k, size, inverse)
        types = {name: dtype for name in ("q", "k", "cos", "sin", "out_q", "out_k")} | {"num_rows": "i32"}
        types |= dict.fromkeys(("q_row", "q_head", "k_row", "k_head"), "i32:16") | dict.fromkeys(constants, "constexpr")
        signature = {name: types[name] for name in _rotate.arg_names}
        yield Specimen(_rotate, signature, constants, _NUM_WARPS, num_stages=1)


@cache
def _constants(num_q: int, num_k: int, head_size: int, inverse: bool) -> Mapping[str, Any]:
    return {
        "NUM_Q": num_q,
        "NUM_K": num_k,
        "Q_BLOCKS": triton.cdiv(num_q, _HEADS),
        "K_BLOCKS": triton.cdiv(num_k, _HEADS),
        "HALF": head_size // 2,
        "BLOCK_E": triton.next_power_of_2(head_size // 2),
        "ROWS": _ROWS,
        "HEADS": _HEADS,
        "INVERSE": inverse,
    }
