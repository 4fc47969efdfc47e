"""RMS norm, with the residual added first: memory-bound, a row is read once and held in registers."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.dependent import begins_early, launch_options, wait_turn

_TILE = 4096  # values a program: 32 a thread, so that eight 16-byte loads are in flight


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `peftkit_kernels.reference.rms_norm`; a row's bits don't depend on its neighbours."""
    x_TCH = _three_dimensional(x_TH)
    num_outer, num_inner, width = x_TCH.shape
    y_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    total_TH = x_TH if residual_TH is None else torch.empty_like(y_TH)
    residual_TCH = x_TCH if residual_TH is None else _three_dimensional(residual_TH)
    block, rows, num_warps = _config(width)
    num_rows = num_outer * num_inner
    dependent = begins_early(x_TH.device, num_outer)
    if num_rows:
        _launch(
            cdiv(num_rows, rows),
            (x_TCH, weight_H, residual_TCH, y_TH, total_TH),
            (num_rows, eps),
            (*x_TCH.stride()[:2], *residual_TCH.stride()[:2]),
            (num_inner, width, block, rows, residual_TH is not None, dependent),
            num_warps,
            **launch_options(dependent),
        )
    return y_TH, total_TH


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    weight,
    residual,
    y,
    total,
    num_rows,
    eps,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ROWS rows a program; y and total are contiguous."""
    if DEPENDENT:
        wait_turn()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    outer, inner = (row // INNER).to(tl.int64), row % INNER
    row = row.to(tl.int64)
    value = tl.load(x + outer * x_outer + inner * x_inner + column, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0)  # here, so that the sum doesn't hold it up
    if HAS_RESIDUAL:
        at = residual + outer * residual_outer + inner * residual_inner + column
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=mask)
        value = rounded.to(tl.float32)  # the norm is of the sum as it is kept
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(y + row * WIDTH + column, (value * scale * by.to(tl.float32)).to(y.dtype.element_ty), mask=mask)


_launch = Again(_rms_norm)


def specimens(capability: int) -> Iterator[Specimen]:
    """The decoder's norms: hidden 4096 and 1536 with a residual, heads of 128 without."""
    for dtype in ("*bf16", "*fp16"):
        for width, has_residual in ((4096, True), (1536, True), (128, False)):
            block, rows, num_warps = _config(width)
            pointers = dict.fromkeys(("x", "weight", "residual", "y", "total"), dtype)
            strides = dict.fromkeys(("x_outer", "x_inner", "residual_outer", "residual_inner"), "i32:16")
            constants = {
                "INNER": 32 if width == 128 else 1,
                "WIDTH": width,
                "BLOCK": block,
                "ROWS": rows,
                "HAS_RESIDUAL": has_residual,
                "DEPENDENT": capability >= 90,
            }
            signature = {**pointers, "num_rows": "i32", **strides, "eps": "fp32"}
            signature |= dict.fromkeys(constants, "constexpr")
            yield Specimen(_rms_norm, signature, constants, num_warps, num_stages=1)


def _config(width: int) -> tuple[int, int, int]:
    """Columns and rows of a tile, and warps: one row a program from 2048 columns, several of a narrow one."""
    block = next_power_of_2(width)
    rows = max(1, min(16, _TILE // 2 // block))
    return block, rows, min(16, max(1, block * rows // 1024))


def _three_dimensional(x_TH: Tensor) -> Tensor:
    """(outer, inner, H) with rows contiguous, a view wherever there is one: heads of a packed qkv stay in place."""
    if x_TH.stride(-1) != 1:
        x_TH = x_TH.contiguous()
    if x_TH.dim() == 2:
        return x_TH.unsqueeze(1)
    return x_TH if x_TH.dim() == 3 else x_TH.reshape(-1, 1, x_TH.shape[-1])
