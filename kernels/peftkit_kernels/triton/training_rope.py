"""Rotation of queries and keys for training and its transpose: memory-bound, one launch for both, and for values."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen

_ROWS, _HEADS, _NUM_WARPS = 2, 8, 4  # of a program: a 16-byte load of each half, cosine and sine a thread


def rotate(
    q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """See `peftkit_kernels.training_steps.rotate`."""
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_NQD, k_NKD))
    _launch(_heads(q_NQD), _heads(k_NKD), None, cos_ND, sin_ND, (out_q, out_k, out_k), inverse)
    return out_q, out_k


def rotate_(q_NQD: Tensor, k_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> None:
    """See `peftkit_kernels.training_steps.rotate_`."""
    _launch(q_NQD, k_NKD, None, cos_ND, sin_ND, (q_NQD, k_NKD, k_NKD), inverse=False)


def rotate_back(dq_NQD: Tensor, dk_NKD: Tensor, dv_NKD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """See `peftkit_kernels.training_steps.rotate_back`."""
    num_rows, num_q, head_size = dq_NQD.shape
    num_k = dk_NKD.shape[1]
    out_NXD = torch.empty((num_rows, num_q + 2 * num_k, head_size), dtype=dq_NQD.dtype, device=dq_NQD.device)
    outs = out_NXD.split_with_sizes((num_q, num_k, num_k), 1)
    _launch(_heads(dq_NQD), _heads(dk_NKD), _heads(dv_NKD), cos_ND, sin_ND, outs, inverse=True)
    return out_NXD


def _launch(
    q_NQD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor | None,
    cos_ND: Tensor,
    sin_ND: Tensor,
    outs: Sequence[Tensor],
    inverse: bool,
) -> None:
    num_rows, num_q, head_size = q_NQD.shape
    out_q, out_k, out_v = outs
    v = k_NKD if v_NKD is None else v_NKD
    blocks, constants = _cut(num_q, k_NKD.shape[1], head_size, inverse, v_NKD is not None)
    if num_rows:
        tensors = (q_NQD, k_NKD, v, cos_ND.contiguous(), sin_ND.contiguous(), out_q, out_k, out_v)
        strides = [stride for x in (q_NQD, k_NKD, v, out_q, out_k) for stride in x.stride()[:2]]
        _again(-(-num_rows // _ROWS) * blocks, tensors, (num_rows,), strides, constants, _NUM_WARPS)


def _heads(x_NXD: Tensor) -> Tensor:
    return x_NXD if x_NXD.stride(2) == 1 else x_NXD.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _rotate(
    q, k, v, cos, sin, out_q, out_k, out_v, num_rows, q_row, q_head, k_row, k_head, v_row, v_head,
    out_q_row, out_q_head, out_k_row, out_k_head,
    NUM_Q: tl.constexpr, NUM_K: tl.constexpr, Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """A program has ROWS rows of HEADS queries, of HEADS keys, or of HEADS values, which it copies. out_q and out_k may
    be q and k: a value is written by the thread that read it. out_v has the strides of out_k."""
    lines = tl.arange(0, ROWS * HEADS)
    block = tl.program_id(0) % BLOCKS
    row = (tl.program_id(0) // BLOCKS).to(tl.int64) * ROWS + lines // HEADS
    head = block * HEADS + lines % HEADS
    if block < Q_BLOCKS:
        _turn(
            q, cos, sin, out_q, row, head, num_rows, q_row, q_head, out_q_row, out_q_head, NUM_Q, HALF, BLOCK_E, INVERSE
        )
    elif block < Q_BLOCKS + K_BLOCKS:
        head -= Q_BLOCKS * HEADS
        _turn(
            k, cos, sin, out_k, row, head, num_rows, k_row, k_head, out_k_row, out_k_head, NUM_K, HALF, BLOCK_E, INVERSE
        )
    else:
        head -= (Q_BLOCKS + K_BLOCKS) * HEADS
        _copy(v, out_v, row, head, num_rows, v_row, v_head, out_k_row, out_k_head, NUM_K, HALF, BLOCK_E)


_again = Again(_rotate)


@triton.jit
def _turn(
    x, cos, sin, out, row, head, num_rows, x_row, x_head, out_row, out_head,
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
    at_out = out + (row * out_row + head * out_head)[:, None] + offs_e
    tl.store(at_out, turned_first.to(out.dtype.element_ty), mask=live)
    tl.store(at_out + HALF, turned_second.to(out.dtype.element_ty), mask=live)


@triton.jit
def _copy(
    x, out, row, head, num_rows, x_row, x_head, out_row, out_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    live = ((row < num_rows) & (head < NUM_HEADS))[:, None] & (offs_e < HALF)
    at = x + (row * x_row + head * x_head)[:, None] + offs_e
    at_out = out + (row * out_row + head * out_head)[:, None] + offs_e
    tl.store(at_out, tl.load(at, mask=live), mask=live)
    tl.store(at_out + HALF, tl.load(at + HALF, mask=live), mask=live)


def specimens() -> Iterator[Specimen]:
    """Some models' heads, both ways, with values and without."""
    for dtype, num_q, num_k, size, inverse in (
        ("*bf16", 32, 8, 128, False),
        ("*bf16", 32, 8, 128, True),
        ("*fp16", 12, 2, 128, False),
        ("*bf16", 9, 3, 64, True),
    ):
        constants = _constants(num_q, num_k, size, inverse, inverse)
        names = [name for name in _rotate.arg_names if name not in constants]
        types = {name: "i32:16" if name.endswith(("_row", "_head")) else dtype for name in names}
        types |= {"num_rows": "i32"} | dict.fromkeys(constants, "constexpr")
        signature = {name: types[name] for name in _rotate.arg_names}
        yield Specimen(_rotate, signature, constants, _NUM_WARPS, num_stages=1)


@cache
def _constants(num_q: int, num_k: int, head_size: int, inverse: bool, with_values: bool) -> Mapping[str, Any]:
    q_blocks, k_blocks = triton.cdiv(num_q, _HEADS), triton.cdiv(num_k, _HEADS)
    return {
        "NUM_Q": num_q,
        "NUM_K": num_k,
        "Q_BLOCKS": q_blocks,
        "K_BLOCKS": k_blocks,
        "BLOCKS": q_blocks + k_blocks * (2 if with_values else 1),
        "HALF": head_size // 2,
        "BLOCK_E": triton.next_power_of_2(head_size // 2),
        "ROWS": _ROWS,
        "HEADS": _HEADS,
        "INVERSE": inverse,
    }


@cache
def _cut(*sizes: Any) -> tuple[int, tuple[object, ...]]:
    """Programs for a few rows, and constants."""
    constants = _constants(*sizes)
    return constants["BLOCKS"], tuple(constants.values())
