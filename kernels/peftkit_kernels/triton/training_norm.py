"""RMS norm for training, forward and backward: memory-bound, a row is read once and held in registers."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen

_FORWARD, _BACKWARD = 32, 16  # values of a row a thread: eight 16-byte loads in flight, over one tensor or several


def rms_norm_forward(x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `peftkit_kernels.training_steps.rms_norm_forward`."""
    y_NH = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    scale_N = torch.empty(x_NH.shape[:-1], dtype=torch.float32, device=x_NH.device)
    x_NH, outer, heads = _rows(x_NH)
    if num_rows := scale_N.numel():
        programs, constants, num_warps = _cut(num_rows, x_NH.shape[-1], heads, False, _FORWARD)
        tensors = (x_NH, x_NH, weight_H, y_NH, y_NH, scale_N)
        _forward(programs, tensors, (num_rows, eps), (outer,), constants, num_warps)
    return y_NH, scale_N


def add_rms_norm_forward(
    x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `peftkit_kernels.training_steps.add_rms_norm_forward`."""
    x_NH, residual_NH = x_NH.contiguous(), residual_NH.contiguous()
    y_NH, total_NH = torch.empty_like(x_NH), torch.empty_like(x_NH)
    scale_N = torch.empty(x_NH.shape[:-1], dtype=torch.float32, device=x_NH.device)
    if num_rows := scale_N.numel():
        width = x_NH.shape[-1]
        programs, constants, num_warps = _cut(num_rows, width, 1, True, _BACKWARD)  # over two tensors too
        tensors = (x_NH, residual_NH, weight_H, total_NH, y_NH, scale_N)
        _forward(programs, tensors, (num_rows, eps), (width,), constants, num_warps)
    return y_NH, total_NH, scale_N


def rms_norm_backward(
    dy_NH: Tensor, x_NH: Tensor, weight_H: Tensor, scale_N: Tensor, added_NH: Tensor | None = None
) -> Tensor:
    """See `peftkit_kernels.training_steps.rms_norm_backward`."""
    dx_NH = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device)
    dy_NH, (x_NH, outer, heads) = dy_NH.contiguous(), _rows(x_NH)
    if num_rows := scale_N.numel():
        adds = added_NH is not None
        programs, constants, num_warps = _cut(num_rows, x_NH.shape[-1], heads, adds, _BACKWARD)
        tensors = (dy_NH, x_NH, weight_H, scale_N, dy_NH if added_NH is None else added_NH.contiguous(), dx_NH)
        _backward(programs, tensors, (num_rows,), (outer,), constants, num_warps)
    return dx_NH


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _rms_norm_forward(
    x, residual, weight, total, y, scale, num_rows, eps, x_outer,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = row < num_rows
    mask = live & (column < WIDTH)
    at = row * WIDTH + column
    at_x = row // HEADS * x_outer + row % HEADS * WIDTH + column
    value = tl.load(x + at_x, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(scale + row, inverse, mask=live)
    tl.store(y + at, (value * inverse * by).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward(
    dy, x, weight, scale, added, dx, num_rows, x_outer,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    live = row < num_rows
    mask = live & (column < WIDTH)
    at = row * WIDTH + column
    at_x = row // HEADS * x_outer + row % HEADS * WIDTH + column
    inverse = tl.load(scale + row, mask=live, other=0.0)
    normed = tl.load(x + at_x, mask=mask, other=0.0).to(tl.float32) * inverse
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    weighted = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * by
    shared = tl.sum(weighted * normed, axis=1, keep_dims=True) / WIDTH
    result = inverse * (weighted - normed * shared)
    if ADDS:
        result += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)


_forward, _backward = Again(_rms_norm_forward), Again(_rms_norm_backward)


def specimens() -> Iterator[Specimen]:
    """Hidden 4096 and 1536, and heads of 128, side by side and as parts of wider rows."""
    for dtype in ("*bf16", "*fp16"):
        for width, heads in ((4096, 1), (1536, 1), (128, 1), (128, 16)):
            yield _specimen(_rms_norm_forward, dtype, width, heads, False, _FORWARD)
            yield _specimen(_rms_norm_backward, dtype, width, heads, False, _BACKWARD)
        for width in (4096, 1536):
            yield _specimen(_rms_norm_forward, dtype, width, 1, True, _BACKWARD)
            yield _specimen(_rms_norm_backward, dtype, width, 1, True, _BACKWARD)


def _specimen(kernel: Any, dtype: str, width: int, heads: int, adds: bool, values: int) -> Specimen:
    block, rows, num_warps = _config(width, values)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows, "HEADS": heads, "ADDS": adds}
    types = {"scale": "*fp32", "num_rows": "i32", "eps": "fp32", "x_outer": "i32:16"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, dtype) for name in kernel.arg_names}
    return Specimen(kernel, signature, constants, num_warps, num_stages=1)


@cache
def _config(width: int, values: int) -> tuple[int, int, int]:
    """Columns and rows of a tile, and warps: one row a program from 2048 columns, several of a narrow one."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(16, 2048 // block))
    return block, rows, min(32, max(1, block * rows // (32 * values)))


def _cut(num_rows: int, width: int, heads: int, adds: bool, values: int) -> tuple[int, tuple[object, ...], int]:
    """Programs, constants and warps."""
    block, rows, num_warps = _config(width, values)
    return -(-num_rows // rows), (width, block, rows, heads, adds), num_warps


def _rows(x_NH: Tensor) -> tuple[Tensor, int, int]:
    """Rows in place where they lie end to end, or do so many at a time, as heads that are parts of wider rows: with the
    way from one such bundle to the next, and rows in it."""
    width = x_NH.shape[-1]
    if not x_NH.is_contiguous() and x_NH.dim() == 3 and x_NH.stride()[1:] == (width, 1):
        return x_NH, x_NH.stride(0), x_NH.shape[1]
    return x_NH.contiguous(), width, 1
