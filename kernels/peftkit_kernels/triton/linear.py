"""A product with weights in bfloat16 or float16 for few rows: memory-bound, every weight is read once.

Weights are the tall operand of the tensor cores, rows of x the narrow one; a single row takes no tensor cores. As many
programs as the card holds at once share out the tiles of outputs evenly. Where there are fewer tiles, each is cut along
the input, and the program that finishes a tile's last part, known by an atomic counter that it sets back to zero, adds
the parts up in their order.

On compute capability 9.0 and above the first weights of each program are on their way to L2 while the kernel before
still runs (`dependent`).
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from peftkit_kernels import reference
from peftkit_kernels.segments import MAX_RANK
from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.dependent import begins_early, launch_options, wait_turn
from peftkit_kernels.triton.device import capability_of, counters_of, multiprocessors_of

_MAX_ROWS = 64
"""More rows are cuBLAS's, as it is quicker. From 33 on it is quicker without updates too, but they run beside this
kernel alone, and what a bare row gives may not depend on whether one follows."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a product is cut."""

    rows: int
    """Rows of x a program, padded: the narrow side of its tensor-core tile; 1 takes no tensor cores."""
    outs: int
    """Output features of a tile."""
    block_k: int
    """Input features of a step."""
    num_warps: int
    num_stages: int
    per_sm: int
    """Programs that a multiprocessor holds at once."""
    ahead: int = 32
    """KiB of weights that a multiprocessor sends for before the kernel before this one has ended."""


CONFIGS: Mapping[int, Config] = MappingProxyType(
    {
        1: Config(1, 8, 2048, 8, 3, 2),
        16: Config(16, 64, 128, 4, 3, 3),
        32: Config(32, 64, 128, 4, 4, 2),
        64: Config(64, 128, 128, 8, 4, 1),
    }
)
"""Most rows → configuration, for compute capability 9.0 and above; older cards keep to cuBLAS, as none was timed."""

_OVERRIDE: ContextVar[Config | None] = ContextVar("linear config", default=None)
_COUNTERS = 1 << 12
_NARROW = MAX_RANK  # products with an adapter's rank as input would be compiled when it comes
_MAX_SPLITS = 16
_SEND = tl.constexpr(
    "{ .reg .pred sends; setp.eq.s32 sends, $3, 0; @sends cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


def candidates(kind: str) -> Iterator[Config]:
    """Configurations worth timing for so many rows."""
    rows = int(kind)
    if rows == 1:
        for outs, (block_k, num_warps), stages, per_sm in product(
            (4, 8, 16), ((2048, 8), (1024, 4), (512, 2)), (1, 2, 3, 4), (2, 3, 4)
        ):
            yield Config(1, outs, block_k, num_warps, stages, per_sm)
    padded = max(16, next_power_of_2(rows))
    for outs, block_k, stages, per_sm in product((32, 64, 128, 256), (64, 128, 256), (3, 4, 5, 6), (1, 2, 3)):
        shared = per_sm * stages * 2 * block_k * (outs + padded)
        if 64 << 10 <= shared <= 226 << 10 and outs * padded <= 256 * 64:
            yield Config(padded, outs, block_k, 8 if outs * padded >= 256 * 64 else 4, stages, per_sm)


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Takes `config` for every launch inside; its number of rows is the caller's to match."""
    token = _OVERRIDE.set(config)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See `peftkit_kernels.reference.linear`, which takes what the kernel isn't for: float32, more than few rows,
    inputs no wider than a LoRA's rank, weights or outputs whose rows don't begin at multiples of 16 bytes, older cards,
    and whatever is deterministic. The kernel has no gradient."""
    if deterministic or not _takes(x_TI, weight_OI):
        return reference.linear(x_TI, weight_OI, bias_O, deterministic=deterministic)
    num_rows, in_features = x_TI.shape
    out_features, device = weight_OI.shape[0], x_TI.device
    y_TO = torch.empty(num_rows, out_features, dtype=x_TI.dtype, device=device)
    if not y_TO.numel():
        return y_TO
    if x_TI.stride(1) != 1 or x_TI.stride(0) % 8 or x_TI.data_ptr() % 16:
        x_TI = x_TI.clone(memory_format=torch.contiguous_format)
    config = _config(num_rows)
    programs, num_splits = _share_out(out_features, in_features, config, multiprocessors_of(device))
    num_sums = programs * config.rows * config.outs if num_splits > 1 else 0
    dependent = begins_early(device, num_rows)
    sums = torch.empty(num_sums, dtype=torch.float32, device=device)
    eighths = (out_features // 8, in_features // 8, x_TI.stride(0) // 8, weight_OI.stride(0) // 8)
    _launch(
        programs,
        (x_TI, weight_OI, y_TO if bias_O is None else bias_O, y_TO, sums, counters_of("linear", _COUNTERS, device)),
        (num_rows, *eighths, num_splits),
        (),
        (*_constants(config, in_features, bias_O is not None, dependent).values(),),
        config.num_warps,
        num_stages=config.num_stages,
        **launch_options(dependent),
    )
    return y_TO


def _takes(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether the kernel is for these; it follows from the card, shapes, strides and dtypes."""
    out_features, in_features = weight_OI.shape
    aligned = weight_OI.stride(1) == 1 and weight_OI.stride(0) % 8 == 0 and weight_OI.data_ptr() % 16 == 0
    eights = out_features % 8 == 0 and in_features % 8 == 0 and in_features > _NARROW
    half = x_TI.dtype in (torch.bfloat16, torch.float16)
    return x_TI.shape[0] <= _MAX_ROWS and aligned and eights and half and capability_of(x_TI.device, 90) >= 90


@triton.jit(do_not_specialize=["num_rows", "out_8", "in_8", "x_stride_8", "weight_stride_8", "num_splits"])
def _linear(
    x, weight, bias, y, part, arrived, num_rows, out_8, in_8, x_stride_8, weight_stride_8, num_splits,
    ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr,
    AHEAD: tl.constexpr, PIECE: tl.constexpr, WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program p of P: all of the tiles p, p + P, …; with num_splits > 1 part p % num_splits of one tile.

    out_8, in_8, x_stride_8, weight_stride_8: eighths, so that the compiler knows of 16-byte pieces.
    """
    out_features, in_features, x_stride, weight_stride = out_8 * 8, in_8 * 8, x_stride_8 * 8, weight_stride_8 * 8
    steps, every = tl.cdiv(in_features, BLOCK_K), tl.num_programs(0)
    tile, share = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    first = steps * share // num_splits
    steps = steps * (share + 1) // num_splits - first
    num_steps = steps
    if num_splits == 1:
        num_steps = steps * ((tl.cdiv(out_features, OUTS) - tile + every - 1) // every)
    if AHEAD:
        place = first * BLOCK_K
        _send_for(weight, tile * OUTS, place, out_features, in_features, weight_stride, OUTS, LANES, AHEAD, PIECE)
    if DEPENDENT:
        wait_turn()
    row, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    live = (row < num_rows)[:, None]
    x_at = x + row[:, None] * x_stride + k[None, :]
    acc = _nothing(ROWS, OUTS, BLOCK_K)
    for i in tl.range(0, num_steps, num_stages=STAGES):
        at, start = first + i % steps, (tile + i // steps * every) * OUTS
        out = start + tl.arange(0, OUTS)
        out = tl.minimum(out, out_features - 1).to(tl.int64)  # a ragged tile reads the last row again: no masks
        w_at = weight + out[:, None] * weight_stride + (at * BLOCK_K + k)[None, :]
        if WHOLE_K:
            w_OK = tl.load(w_at)
            x_RK = tl.load(x_at + at * BLOCK_K, mask=live, other=0.0)
        else:
            inside = (at * BLOCK_K + k < in_features)[None, :]
            w_OK = tl.load(w_at, mask=inside, other=0.0)
            x_RK = tl.load(x_at + at * BLOCK_K, mask=live & inside, other=0.0)
        acc = _add(acc, w_OK, x_RK, ROWS, OUTS, BLOCK_K)
        if (i % steps == steps - 1) & (num_splits == 1):
            _store(y, bias, start, _sum(acc, ROWS), num_rows, out_features, ROWS, OUTS, HAS_BIAS)
            acc = _nothing(ROWS, OUTS, BLOCK_K)
    if num_splits > 1:
        inner = tl.arange(0, OUTS)[:, None] + tl.arange(0, ROWS)[None, :] * OUTS
        parts = part + (tile * num_splits).to(tl.int64) * (OUTS * ROWS) + inner
        wanted = tl.broadcast_to((row < num_rows)[None, :], (OUTS, ROWS))
        tl.store(parts + share * (OUTS * ROWS), _sum(acc, ROWS), mask=wanted)
        tl.debug_barrier()  # every thread's stores before the one that counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrived + tile, 0)
            total = tl.zeros((OUTS, ROWS), tl.float32)
            for s in range(0, num_splits):  # past L1, which other programs' stores don't reach
                total += tl.load(parts + s * (OUTS * ROWS), mask=wanted, other=0.0, cache_modifier=".cg")
            _store(y, bias, tile * OUTS, total, num_rows, out_features, ROWS, OUTS, HAS_BIAS)


@triton.jit
def _nothing(ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums before the first step; those of a single row are apart for every eight inputs."""
    if ROWS == 1:
        acc = tl.zeros((OUTS, BLOCK_K // 8), tl.float32)
    else:
        acc = tl.zeros((OUTS, ROWS), tl.float32)
    return acc


@triton.jit
def _add(acc, w_OK, x_RK, ROWS: tl.constexpr, OUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    if ROWS == 1:
        terms = w_OK.to(tl.float32) * x_RK.to(tl.float32)
        acc += tl.sum(tl.reshape(terms, (OUTS, BLOCK_K // 8, 8)), axis=2)
    else:
        acc = tl.dot(w_OK, x_RK.T, acc)
    return acc


@triton.jit
def _sum(acc, ROWS: tl.constexpr):
    """Sums as (OUTS, ROWS)."""
    if ROWS == 1:
        acc = tl.sum(acc, axis=1)[:, None]
    return acc


@triton.jit
def _store(
    y, bias, start, value, num_rows, out_features, ROWS: tl.constexpr, OUTS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    out, row = start + tl.arange(0, OUTS), tl.arange(0, ROWS)
    inside = out < out_features
    if HAS_BIAS:
        value += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = y + row.to(tl.int64)[None, :] * out_features + out[:, None]
    tl.store(at, value.to(y.dtype.element_ty), mask=inside[:, None] & (row < num_rows)[None, :])


@triton.jit
def _send_for(
    weight, first_out, first_in, out_features, in_features, weight_stride, OUTS: tl.constexpr, LANES: tl.constexpr,
    AHEAD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Begins to bring AHEAD bytes of each of OUTS outputs to L2, a PIECE of them at a time; nothing is read."""
    each: tl.constexpr = AHEAD // PIECE
    apart: tl.constexpr = LANES // (OUTS * each)  # threads a piece, of which one sends: warps share the work
    piece = tl.arange(0, LANES) // apart
    out = tl.minimum(first_out + piece // each, out_features - 1).to(tl.int64)
    start = tl.minimum(first_in + piece % each * (PIECE // 2), in_features - PIECE // 2)
    tl.inline_asm_elementwise(
        _SEND, "=r,l,r,r", [(weight + out * weight_stride + start).to(tl.int64), PIECE, tl.arange(0, LANES) % apart],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def _constants(config: Config, in_features: int, has_bias: bool, dependent: bool) -> dict[str, int | bool]:
    lanes = max(32 * config.num_warps, config.outs)
    ahead = min(1024 * config.ahead // (config.per_sm * config.outs), 2 * in_features) if dependent else 0
    ahead = 1 << ahead.bit_length() - 1 if ahead >= 16 else 0  # bytes of an output
    return {
        "ROWS": config.rows,
        "OUTS": config.outs,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "LANES": lanes,
        "AHEAD": ahead,
        "PIECE": max(min(ahead, 512), ahead * config.outs // lanes),
        "WHOLE_K": in_features % config.block_k == 0,
        "HAS_BIAS": has_bias,
        "DEPENDENT": dependent,
    }


def _share_out(out_features: int, in_features: int, config: Config, multiprocessors: int) -> tuple[int, int]:
    """Programs, and parts of each tile. Whole tiles where they fill the card in even rounds."""
    tiles, room = cdiv(out_features, config.outs), multiprocessors * config.per_sm
    rounds = cdiv(tiles, room)
    steps = cdiv(in_features, config.block_k)
    splits = min(room // tiles, steps, _MAX_SPLITS) if tiles <= _COUNTERS else 1
    if splits > 1:
        return tiles * splits, splits
    return cdiv(tiles, rounds), 1


def _config(num_rows: int) -> Config:
    return _OVERRIDE.get() or next(config for rows, config in CONFIGS.items() if num_rows <= rows)


_launch = Again(_linear)


def specimens(capability: int = 90) -> Iterator[Specimen]:
    """Each configuration, for few rows with ragged inputs too; nothing for cards that have none."""
    cuts = list(CONFIGS.values()) if capability >= 90 else []
    uses = [("*bf16", config, 4096) for config in cuts] + [("*fp16", config, 4104) for config in cuts[:2]]
    for dtype, config, features in uses:
        constants = _constants(config, features, features % 16 > 0, True)
        sizes = ("num_rows", "out_8", "in_8", "x_stride_8", "weight_stride_8", "num_splits")
        types = dict.fromkeys(("x", "weight", "bias", "y"), dtype) | dict.fromkeys(sizes, "i32")
        types |= {"part": "*fp32", "arrived": "*i32"} | dict.fromkeys(constants, "constexpr")
        signature = {name: types[name] for name in _linear.arg_names}
        yield Specimen(_linear, signature, constants, config.num_warps, config.num_stages)
