"""Rotation of queries and keys with the write of keys and values into the pages, in one pass."""
# pyright: reportMissingParameterType=false, reportCallIssue=false

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.dependent import begins_early, launch_options, wait_turn


@dataclass(frozen=True, slots=True)
class Config:
    """How the rows × heads are cut."""

    rows: int
    heads: int
    num_warps: int


CONFIGS: Mapping[int, Config] = MappingProxyType({256: Config(1, 16, 2), 1 << 31: Config(2, 16, 4)})
"""Rows up to which it holds → configuration, on every card: few rows are spread over as many programs as they make."""

_OVERRIDE: ContextVar[Config | None] = ContextVar("rope config", default=None)


def candidates() -> list[Config]:
    """Configurations worth timing."""
    return [Config(*cut) for cut in product((1, 2, 4, 8), (4, 8, 16, 64), (1, 2, 4, 8))]


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Takes `config` for every launch inside."""
    token = _OVERRIDE.set(config)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["cell"])
def rope_kernel(
    qkv, cos, sin, cell, kv, out, num_rows,
    ROW_STRIDE: tl.constexpr, NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). A row's keys and values are 2 K heads of a cell in their order in `qkv`."""
    NUM_HEADS: tl.constexpr = NUM_Q + 2 * NUM_KV
    HEAD: tl.constexpr = 2 * HALF
    if DEPENDENT:
        wait_turn()
    lines = tl.arange(0, ROWS * HEADS)
    row = tl.program_id(1) * ROWS + lines // HEADS
    head = tl.program_id(0) * HEADS + lines % HEADS
    offs_e = tl.arange(0, BLOCK_E)[None, :]
    live = ((row < num_rows) & (head < NUM_HEADS))[:, None] & (offs_e < HALF)
    place = tl.load(cell + row, mask=(row < num_rows) & (head >= NUM_Q), other=0)
    wide = row.to(tl.int64)
    at = qkv + (wide * ROW_STRIDE + head * HEAD)[:, None] + offs_e
    first = tl.load(at, mask=live, other=0.0)
    second = tl.load(at + HALF, mask=live, other=0.0)
    turned = live & (head < NUM_Q + NUM_KV)[:, None]  # values are copied: by the angle 0
    at_angle = (wide * HALF)[:, None] + offs_e
    c = tl.load(cos + at_angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + at_angle, mask=turned, other=0.0).to(tl.float32)
    x, y = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(turned, x * c - y * s, x).to(first.dtype)
    second = tl.where(turned, y * c + x * s, y).to(second.dtype)
    is_query = live & (head < NUM_Q)[:, None]
    at_out = out + (wide * (NUM_Q * HEAD) + head * HEAD)[:, None] + offs_e
    tl.store(at_out, first, mask=is_query)
    tl.store(at_out + HALF, second, mask=is_query)
    kept = live & (head >= NUM_Q)[:, None]
    at_kv = kv + (place * (2 * NUM_KV * HEAD) + (head - NUM_Q) * HEAD)[:, None] + offs_e
    tl.store(at_kv, first, mask=kept)
    tl.store(at_kv + HALF, second, mask=kept)


def rope_write_kv(qkv_TCD: Tensor, cos_TE: Tensor, sin_TE: Tensor, cell_T: Tensor, kv_PZ2KD: Tensor) -> Tensor:
    """As `reference.rope_write_kv`; q_TQD is contiguous."""
    num_rows, num_heads, head_size = qkv_TCD.shape
    num_kv = kv_PZ2KD.shape[3]
    num_q = num_heads - 2 * num_kv
    q_TQD = qkv_TCD.new_empty(num_rows, num_q, head_size)
    if not num_rows:
        return q_TQD
    if qkv_TCD.stride()[1:] != (head_size, 1):
        qkv_TCD = qkv_TCD.contiguous()
    config, dependent = _config(num_rows), begins_early(qkv_TCD.device, num_rows)
    grid = (cdiv(num_heads, config.heads), cdiv(num_rows, config.rows))
    constants = _constants(qkv_TCD.stride(0), num_q, num_kv, head_size, config, dependent)
    tensors = (qkv_TCD, cos_TE.contiguous(), sin_TE.contiguous(), cell_T, kv_PZ2KD, q_TQD)
    _launch(grid, tensors, (num_rows,), (), (*constants.values(),), config.num_warps, **launch_options(dependent))
    return q_TQD


_launch = Again(rope_kernel)


def specimens(capability: int = 90) -> Iterator[Specimen]:
    """The kernel for some models' heads."""
    pointers = ("qkv", "cos", "sin", "kv", "out")
    for config, (dtype, num_q, num_kv, head) in product(
        CONFIGS.values(), (("*bf16", 32, 8, 128), ("*fp16", 12, 2, 128), ("*bf16", 9, 3, 64))
    ):
        types: dict[str, str] = dict.fromkeys(pointers, dtype)
        constants = _constants((num_q + 2 * num_kv) * head, num_q, num_kv, head, config, capability >= 90)
        types |= {"cell": "*i64", "num_rows": "i32"} | dict.fromkeys(constants, "constexpr")
        signature = {name: types[name] for name in rope_kernel.arg_names}
        yield Specimen(rope_kernel, signature, constants, config.num_warps, 1)


def _constants(row_stride: int, num_q: int, num_kv: int, head: int, config: Config, dependent: bool) -> dict[str, Any]:
    return {
        "ROW_STRIDE": row_stride,
        "NUM_Q": num_q,
        "NUM_KV": num_kv,
        "HALF": head // 2,
        "BLOCK_E": next_power_of_2(head // 2),
        "ROWS": config.rows,
        "HEADS": config.heads,
        "DEPENDENT": dependent,
    }


def _config(num_rows: int) -> Config:
    chosen = _OVERRIDE.get()
    return chosen or next(config for limit, config in CONFIGS.items() if num_rows <= limit)
