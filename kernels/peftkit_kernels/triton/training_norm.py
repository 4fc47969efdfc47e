"""RMS norm for training, forward and backward: memory-bound, a row is read once and held in registers."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen

_FORWARD, _BACKWARD = 32, 16  # values of a row a thread: eight 16-byte loads in flight, over one or two tensors


def rms_norm_forward(x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `peftkit_kernels.training_steps.rms_norm_forward`."""
    x_NH = x_NH.contiguous()
    y_NH = torch.empty_like(x_NH)
    scale_N = torch.empty(x_NH.shape[:-1], dtype=torch.float32, device=x_NH.device)
    block, rows, num_warps = _config(x_NH.shape[-1], _FORWARD)
    if num_rows := scale_N.numel():
        _rms_norm_forward[(-(-num_rows // rows),)](
            x_NH,
            weight_H,
            y_NH,
            scale_N,
            num_rows,
            eps,
            WIDTH=x_NH.shape[-1],
            BLOCK=block,
            ROWS=rows,
            num_warps=num_warps,
        )
    return y_NH, scale_N


def rms_norm_backward(dy_NH: Tensor, x_NH: Tensor, weight_H: Tensor, scale_N: Tensor) -> Tensor:
    """See `peftkit_kernels.training_steps.rms_norm_backward`."""
    dy_NH, x_NH = dy_NH.contiguous(), x_NH.contiguous()
    dx_NH = torch.empty_like(x_NH)
    block, rows, num_warps = _config(x_NH.shape[-1], _BACKWARD)
    if num_rows := scale_N.numel():
        _rms_norm_backward[(-(-num_rows // rows),)](
            dy_NH,
            x_NH,
            weight_H,
            scale_N,
            dx_NH,
            num_rows,
            WIDTH=x_NH.shape[-1],
            BLOCK=block,
            ROWS=rows,
            num_warps=num_warps,
        )
    return dx_NH


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward(
    x, weight, y, scale, num_rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = row < num_rows
    mask = live & (column < WIDTH)
    at = row * WIDTH + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(scale + row, inverse, mask=live)
    tl.store(y + at, (value * inverse * by).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward(
    dy, x, weight, scale, dx, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = row < num_rows
    mask = live & (column < WIDTH)
    at = row * WIDTH + column
    inverse = tl.load(scale + row, mask=live, other=0.0)
    normed = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * inverse
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weighted = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * by
    shared = tl.sum(weighted * normed, axis=1, keep_dims=True) / WIDTH
    result = inverse * (weighted - normed * shared)
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)


def specimens() -> Iterator[Specimen]:
    """Hidden 4096 and 1536, and heads of 128."""
    for dtype in ("*bf16", "*fp16"):
        for width in (4096, 1536, 128):
            yield _specimen(_rms_norm_forward, dtype, width, _FORWARD)
            yield _specimen(_rms_norm_backward, dtype, width, _BACKWARD)


def _specimen(kernel: Any, dtype: str, width: int, values: int) -> Specimen:
    block, rows, num_warps = _config(width, values)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows}
    types = {"scale": "*fp32", "num_rows": "i32", "eps": "fp32", **dict.fromkeys(constants, "constexpr")}
    signature = {name: types.get(name, dtype) for name in kernel.arg_names}
    return Specimen(kernel, signature, constants, num_warps, num_stages=1)


@cache
def _config(width: int, values: int) -> tuple[int, int, int]:
    """Columns and rows of a tile, and warps: one row a program from 2048 columns, several of a narrow one."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(16, 2048 // block))
    return block, rows, min(32, max(1, block * rows // (32 * values)))
