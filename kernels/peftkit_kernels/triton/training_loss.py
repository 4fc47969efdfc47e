"""Cross-entropy over a vocabulary with the gradient written over the logits: a row is read from memory once, and a
second time from the cache, where so few rows are worked on at once that they are still there."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.compile import Specimen


@dataclass(frozen=True, slots=True)
class Config:
    """How a row is cut."""

    num_warps: int
    values: int
    """Neighbours that a thread holds; it keeps one running maximum and sum for them."""


CONFIG = Config(num_warps=16, values=16)

_OVERRIDE: ContextVar[Config | None] = ContextVar("cross-entropy config", default=None)


def candidates() -> list[Config]:
    """Configurations worth timing."""
    return [Config(*cut) for cut in product((8, 16, 32), (8, 16, 32)) if cut != (32, 32)]


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Takes `config` for every launch inside."""
    token = _OVERRIDE.set(config)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """See `peftkit_kernels.training_steps.cross_entropy`."""
    return _losses(logits_NV, targets_N, 1.0, gradient=False)


def cross_entropy_grad(logits_NV: Tensor, targets_N: Tensor, scale: float = 1.0) -> Tensor:
    """See `peftkit_kernels.training_steps.cross_entropy_grad`."""
    return _losses(logits_NV, targets_N, scale, gradient=True)


def _losses(logits_NV: Tensor, targets_N: Tensor, scale: float, gradient: bool) -> Tensor:
    num_rows, vocabulary = logits_NV.shape
    loss_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    config = _OVERRIDE.get() or CONFIG
    if num_rows:
        _cross_entropy[(num_rows,)](
            logits_NV,
            targets_N.contiguous(),
            loss_N,
            logits_NV.stride(0),
            scale,
            **_constants(vocabulary, config, gradient),
            num_warps=config.num_warps,
        )
    return loss_N


@triton.jit
def _cross_entropy(
    logits, targets, loss, stride, scale,
    VOCABULARY: tl.constexpr, LINES: tl.constexpr, VALUES: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """One row a program, LINES × VALUES columns at a time; each line has a running maximum and sum of its own."""
    BLOCK: tl.constexpr = LINES * VALUES
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    aim = tl.load(logits + target).to(tl.float32)  # before anything is written
    offs = tl.arange(0, LINES)[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    top = tl.full((LINES,), -3.0e38, tl.float32)  # finite, so that a line of -inf takes no difference of infinities
    total = tl.zeros((LINES,), tl.float32)
    following = tl.load(logits + offs, mask=offs < VOCABULARY, other=-float("inf"))
    for start in range(0, VOCABULARY, BLOCK):
        value = following.to(tl.float32)
        column = start + BLOCK + offs
        following = tl.load(logits + column, mask=column < VOCABULARY, other=-float("inf"))
        higher = tl.maximum(top, tl.max(value, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
        top = higher
    most = tl.max(top, axis=0)
    whole = tl.sum(total * tl.exp(top - most), axis=0)
    tl.store(loss + row, most + tl.log(whole) - aim)
    if GRADIENT:
        share = scale / whole
        for start in range(0, VOCABULARY, BLOCK):
            column = start + offs
            mask = column < VOCABULARY
            value = tl.load(logits + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            weight = tl.exp(value - most) * share
            weight = tl.where(column == target, weight - scale, weight)
            tl.store(logits + column, weight.to(logits.dtype.element_ty), mask=mask, eviction_policy="evict_first")


def specimens() -> Iterator[Specimen]:
    """Some models' vocabularies."""
    for dtype, vocabulary, gradient in (
        ("*bf16", 128256, True),
        ("*bf16", 128256, False),
        ("*fp16", 128256, True),
        ("*bf16", 151936, True),
        ("*bf16", 262144, True),
        ("*fp32", 128256, True),
    ):
        constants = _constants(vocabulary, CONFIG, gradient)
        types: dict[str, str] = {"logits": dtype, "targets": "*i64", "loss": "*fp32", "stride": "i32:16"}
        types |= {"scale": "fp32", **dict.fromkeys(constants, "constexpr")}
        yield Specimen(_cross_entropy, types, constants, CONFIG.num_warps, num_stages=1)


def _constants(vocabulary: int, config: Config, gradient: bool) -> Mapping[str, Any]:
    lines = 32 * config.num_warps
    return {"VOCABULARY": vocabulary, "LINES": lines, "VALUES": config.values, "GRADIENT": gradient}
