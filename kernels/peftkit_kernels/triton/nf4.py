"""NF4 in bitsandbytes' layout, multiplied by without ever being dequantised in memory, up to some tens of rows.

This is bound by the arithmetic of decoding before it is by memory: levels come from a table in shared memory
(`nf4_table`), products from tensor cores, and a scale is applied to the sum over its block (`nf4_few`, `nf4_wide`) or
to its weights (`nf4_scaled`).
"""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from peftkit_kernels import reference
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.dependent import has_dependents, launch_options
from peftkit_kernels.triton.device import capability_of, counters_of
from peftkit_kernels.triton.nf4_dequantize import nf4_dequantize
from peftkit_kernels.triton.nf4_few import few_kernel
from peftkit_kernels.triton.nf4_parts import add_parts_kernel, parts_kernel
from peftkit_kernels.triton.nf4_scaled import scaled_kernel, spread_kernel
from peftkit_kernels.triton.nf4_wide import wide_kernel


@dataclass(frozen=True, slots=True)
class Config:
    """How a product with NF4 weights is cut."""

    rows: int
    """Rows of x a program: the narrow side of its tensor-core tile."""
    outs: int
    """Output features a program."""
    unroll: int
    """Blocks of 64 inputs at a time."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Few:
    """How a product of up to `MAX_ROWS` rows is cut."""

    rows: int
    """Rows of x at a time."""
    span: int
    """Blocks of 64 inputs at a time; 0: one, with x in shared memory (`nf4_wide`, `nf4_scaled`)."""
    outs: int
    """Output features a warp."""
    num_warps: int
    per_sm: int
    """Programs a multiprocessor."""
    registers: int | None = None
    """Of a thread, at most."""
    deep: int = 1
    """Warps that share outputs and have inputs of their own; fewer where there are too few inputs."""
    each: int = 1
    """Steps whose scales' codes are loaded at once, 1 or 2; fewer where there is an odd number of them."""
    x_ahead: bool = False
    """Whether x is loaded a step before its use."""
    shares: int | None = None
    """Programs that share a tile, at most; 0: programs have a whole tile each, on nearly every multiprocessor."""
    steps: tuple[int, int] | None = None
    """Steps a program, at least and at most."""
    stages: int = 0
    """Steps on their way to shared memory and in use, whose weights are scaled (`nf4_scaled`); 0: their sums are."""


FEW: Mapping[int, tuple[Few, ...]] = MappingProxyType(
    {
        4: (
            Few(4, 2, 32, num_warps=16, per_sm=1, registers=128, deep=16, each=2, x_ahead=True, shares=0),
            Few(4, 2, 32, num_warps=4, per_sm=4, registers=128, deep=4, each=2),
        ),
        8: (
            Few(8, 1, 32, num_warps=4, per_sm=4, registers=128, each=2, x_ahead=True, steps=(0, 8)),
            Few(8, 2, 32, num_warps=4, per_sm=3, registers=168, deep=4, x_ahead=True),
        ),
        16: (
            Few(16, 1, 64, num_warps=4, per_sm=3, registers=168, shares=5),
            Few(16, 1, 32, num_warps=4, per_sm=3, registers=168, deep=4, x_ahead=True, steps=(8, 1 << 30)),
        ),
        32: (Few(32, 0, 16, num_warps=4, per_sm=4, shares=5),),
        64: (Few(64, 0, 16, num_warps=4, per_sm=3, registers=168, shares=5),),
    }
)
"""Number of rows, at most → configurations, of which the first that suits is taken. On other compute capabilities than
9 the last one up to 8 rows, and none above."""

_SCALED = tuple(
    Few(rows, 0, 16, num_warps, per_sm, registers, stages=stages)
    for rows, num_warps, per_sm, registers, stages in (
        (16, 4, 4, 128, 4),
        (16, 4, 2, 255, 12),
        (16, 8, 2, 128, 12),
        (32, 4, 2, 255, 8),
        (32, 8, 1, 255, 8),
        (32, 8, 2, 128, 6),
        (64, 4, 2, 255, 5),
        (64, 4, 2, 255, 6),
        (64, 8, 1, 255, 5),
        (64, 8, 1, 255, 8),
    )
)
"""Cuts of `nf4_scaled` to be timed, none taken by itself. Beside the table of levels, of which the launcher doesn't
know, each takes less than 16 KiB of shared memory or more than 48: between them it wouldn't ask for what both take."""

_LEAST_INPUTS = 256  # Triton 3.6 can't lay out a row of a single step

CONFIGS: Mapping[int, Config] = MappingProxyType(
    {
        16: Config(rows=16, outs=64, unroll=2, num_warps=2, num_stages=4),
        32: Config(rows=32, outs=64, unroll=2, num_warps=2, num_stages=4),
        64: Config(rows=64, outs=64, unroll=1, num_warps=4, num_stages=4),
    }
)
"""Number of rows, rounded up to a tile → configuration."""

MAX_ROWS = 64
"""More rows than this go through dequantised weights and cuBLAS."""

_MOST_SUMS = 2048  # in shared memory beside the tables, in 48 KiB

_EVEN = 0.9  # share of the multiprocessors that have a tile, at least, where programs have whole ones

_MULTIPROCESSORS: Mapping[int, int] = MappingProxyType({8: 108, 9: 132, 10: 148})
C = TypeVar("C", Config, Few)
_override: list[Config | Few] = []


def nf4_linear(
    x_TI: Tensor,
    code_X: Tensor,
    absmax_B: Tensor,
    absmax_code: Tensor,
    absmax_scale: Tensor,
    absmax_offset: Tensor,
    out_features: int,
    bias_O: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """See `peftkit_kernels.reference.nf4_linear`. Up to `MAX_ROWS` rows, and whenever `deterministic`, the weights are
    decoded on the way; levels are rounded to x's dtype, scales (but those of `nf4_scaled`) and sums are float32."""
    num_rows, in_features = x_TI.shape
    if in_features % 64 or (num_rows > MAX_ROWS and not deterministic):
        quantised = (code_X, absmax_B, absmax_code, absmax_scale, absmax_offset)
        weight_OI = nf4_dequantize(*quantised, (out_features, in_features), x_TI.dtype)
        if deterministic:
            return reference.linear(x_TI, weight_OI, bias_O, deterministic=True)
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = torch.empty(num_rows, out_features, dtype=x_TI.dtype, device=x_TI.device)
    if not y_TO.numel():
        return y_TO
    given = (code_X, absmax_B, absmax_code, absmax_scale, absmax_offset)
    quantised = tuple(t.contiguous() for t in given)
    if quantised[0].data_ptr() % 16:  # decoding takes neighbouring codes for one thread's
        quantised = (quantised[0].clone(), *quantised[1:])
    config = None if deterministic else _few(num_rows, out_features, in_features, x_TI)
    if config is None:
        _in_parts(x_TI, quantised, bias_O, y_TO, deterministic)
    else:
        _in_steps(
            x_TI, quantised, bias_O, y_TO, config, constant=all(a is b for a, b in zip(given, quantised, strict=True))
        )
    return y_TO


def _in_steps(
    x_TI: Tensor, quantised: Sequence[Tensor], bias_O: Tensor | None, y_TO: Tensor, config: Few, *, constant: bool
) -> None:
    """Programs that stay, with an even share of the steps each; a tile that several had a share of is added up in order
    by the one that finishes it.

    constant: no kernel has just written the quantised weights, so that they may be read before the kernel's turn.
    """
    num_rows, out_features = y_TO.shape
    in_features, device = x_TI.shape[1], x_TI.device
    code_X, absmax_B, *others = quantised
    if absmax_B.data_ptr() % 4:  # scales are read up to four at a time
        absmax_B, constant = absmax_B.clone(), False
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    row_tiles, num_tiles, num_programs, most = _cut(config, num_rows, out_features, in_features, device)
    dependent = constant and x_TI.is_cuda and has_dependents(device)
    num_sums = 2 * num_programs * config.rows * _outs(config) if most else 0
    sums = torch.empty(num_sums, dtype=torch.float32, device=device)
    if config.stages:
        x_TI = _spread(x_TI, config.rows, dependent)
    strides = () if config.stages else (x_TI.stride(0),)
    _kernel(config)[(num_programs,)](
        x_TI,
        code_X.view(torch.int16),
        absmax_B,
        *others,
        y_TO if bias_O is None else bias_O,
        y_TO,
        sums,
        counters_of("nf4_linear", triton.next_power_of_2(max(2 * num_tiles, 1 << 14)), device),
        num_rows,
        *strides,
        OUT=out_features,
        IN=in_features,
        **_few_constants(config, row_tiles, most),
        OFFSETS=others[-1].dim() > 0,
        HAS_BIAS=bias_O is not None,
        TABLE=x_TI.is_cuda,
        DEPENDENT=dependent,
        num_warps=config.num_warps,
        num_stages=1,
        maxnreg=config.registers,
        **launch_options(dependent),
    )


def _spread(x_TI: Tensor, rows: int, dependent: bool) -> Tensor:
    """x with so many rows, in the order of `nf4_scaled`'s weights."""
    num_rows, in_features = x_TI.shape
    assert num_rows <= rows, "a tile has all rows"
    spread_RI = torch.empty(rows, in_features, dtype=x_TI.dtype, device=x_TI.device)
    spread_kernel[(rows, triton.cdiv(in_features, _SPREAD))](
        x_TI,
        spread_RI,
        num_rows,
        x_TI.stride(0),
        IN=in_features,
        BLOCK=_SPREAD,
        DEPENDENT=dependent,
        num_warps=4,
        **launch_options(dependent),
    )
    return spread_RI


_SPREAD = 1024


def _kernel(config: Few) -> Any:
    if config.span:
        return few_kernel
    return scaled_kernel if config.stages else wide_kernel


def _few_constants(config: Few, row_tiles: int, most: int) -> dict[str, int | bool]:
    if config.stages:
        return {"ROWS": config.rows, "WARPS": config.num_warps, "STAGES": config.stages, "MOST": most}
    constants = {"ROWS": config.rows, "ROW_TILES": row_tiles, "WARPS": config.num_warps, "MOST": most}
    constants |= {"PIECES": 2 if config.rows * _outs(config) > _MOST_SUMS else 1}
    if not config.span:
        return constants
    ways = {"SPAN": config.span, "OUTS": config.outs, "DEEP": config.deep, "EACH": config.each}
    return constants | ways | {"X_AHEAD": config.x_ahead}


def _outs(config: Few) -> int:
    """Output features a tile."""
    return config.num_warps * config.outs // config.deep


def _in_parts(
    x_TI: Tensor, quantised: Sequence[Tensor], bias_O: Tensor | None, y_TO: Tensor, deterministic: bool
) -> None:
    num_rows, out_features = y_TO.shape
    in_features = x_TI.shape[1]
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    major = capability_of(x_TI.device, 90) // 10
    config = _config(MAX_ROWS if deterministic else num_rows)
    tiles = triton.cdiv(out_features, config.outs)
    num_splits = _splits(tiles * config.num_warps, in_features // 64, _MULTIPROCESSORS.get(major, 148))
    sums_STO = y_TO
    if num_splits > 1:
        sums_STO = torch.empty(num_splits, num_rows, out_features, dtype=torch.float32, device=x_TI.device)
    parts_kernel[(tiles, num_splits, triton.cdiv(num_rows, config.rows))](
        x_TI,
        quantised[0].view(torch.int16),
        *quantised[1:],
        y_TO if bias_O is None else bias_O,
        sums_STO,
        num_rows,
        x_TI.stride(0),
        OUT=out_features,
        IN=in_features,
        ROWS=config.rows,
        OUTS=config.outs,
        SPLITS=num_splits,
        UNROLL=config.unroll,
        HAS_BIAS=bias_O is not None,
        PERMUTE=x_TI.is_cuda and x_TI.dtype != torch.float32,
        OFFSETS=quantised[-1].dim() > 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        add_parts_kernel[(num_rows, triton.cdiv(out_features, _ADD))](
            sums_STO,
            y_TO if bias_O is None else bias_O,
            y_TO,
            num_rows,
            OUT=out_features,
            SPLITS=num_splits,
            HAS_BIAS=bias_O is not None,
            BLOCK=_ADD,
            num_warps=4,
        )


_ADD = 512


def candidates(rows: str) -> Iterator[Few]:
    """Configurations worth timing for a product with so many rows."""
    padded = max(4, triton.next_power_of_2(int(rows)))
    yield from (one for one in _SCALED if one.rows == padded)
    programs = ((2, 6), (4, 2), (4, 3), (4, 4), (8, 1), (8, 2))
    if padded >= 16:
        yield from (Few(padded, 0, 16, num_warps, per_sm) for num_warps, per_sm in programs)
    for span, outs, (num_warps, per_sm), deep, x_ahead in product(
        (1, 2), (16, 32, 64), programs, (1, 4), (False, True)
    ):
        fits = padded * outs * num_warps <= 2 * _MOST_SUMS and deep <= num_warps  # in two pieces
        if padded * span in (8, 16) and fits:
            registers = min(255, (65536 // (32 * num_warps * per_sm)) & -8)
            yield Few(padded, span, outs, num_warps, per_sm, registers, deep, each=1 + deep // 4, x_ahead=x_ahead)


@contextmanager
def override(config: Config | Few) -> Iterator[None]:
    """Takes one configuration for what it is for, for the calls inside."""
    _override.append(config)
    try:
        yield
    finally:
        _override.pop()


def _overridden(kind: type[C]) -> C | None:
    return next((config for config in reversed(_override) if isinstance(config, kind)), None)


def _config(num_rows: int) -> Config:
    if config := _overridden(Config):
        return config
    return CONFIGS[min(64, max(16, triton.next_power_of_2(num_rows)))]


def _few(num_rows: int, out_features: int, in_features: int, x_TI: Tensor) -> Few | None:
    """The configuration for a product in steps, None where it is better done in parts."""
    if _overridden(Config) or in_features < _LEAST_INPUTS or (x_TI.is_cuda and x_TI.itemsize != 2):
        return None
    if config := _overridden(Few):
        return _fitting(config, in_features)
    device, configs = x_TI.device, FEW[min(most for most in FEW if most >= num_rows)]
    for config in (_fitting(one, in_features) for one in configs):
        if config.span == 1 and out_features % 16:  # the way to memory would take too much shared memory
            continue
        if capability_of(device, 90) // 10 != 9:
            suits = config.rows <= 8 and config.shares is config.steps is None
        else:
            suits = _suits(config, num_rows, out_features, in_features, device)
        if suits:
            return config
    return None


def _fitting(config: Few, in_features: int) -> Few:
    """The configuration with no more inputs a step than there are."""
    if in_features % 128 and config.span == 2:
        config = replace(config, span=1, rows=max(config.rows, 8))
    groups = in_features // (64 * max(config.span, 1))
    deep = min(config.deep, groups & -groups)
    return replace(config, deep=deep, each=config.each if groups // deep % config.each == 0 else 1)


def _suits(config: Few, num_rows: int, out_features: int, in_features: int, device: torch.device) -> bool:
    _, num_tiles, num_programs, shares = _cut(config, num_rows, out_features, in_features, device)
    steps = num_tiles * _depth(config, in_features) / num_programs
    least, most = config.steps or (0, steps)
    return (config.shares is None or shares <= config.shares) and least <= steps <= most


def _depth(config: Few, in_features: int) -> int:
    """Steps a tile."""
    return in_features // (64 * max(config.span, 1) * config.deep)


def _cut(
    config: Few, num_rows: int, out_features: int, in_features: int, device: torch.device
) -> tuple[int, int, int, int]:
    """Tiles of rows, tiles, programs, and how many of them share a tile at most; 0: none, programs have whole tiles."""
    row_tiles = triton.cdiv(num_rows, config.rows)
    num_tiles = row_tiles * triton.cdiv(out_features, _outs(config))
    depth = _depth(config, in_features)
    room = config.per_sm * _MULTIPROCESSORS.get(capability_of(device, 90) // 10, 148)
    if config.shares == 0 and _EVEN * room <= num_tiles <= room:
        return row_tiles, num_tiles, num_tiles, 0
    num_programs = min(room, num_tiles * depth)
    return row_tiles, num_tiles, num_programs, min(depth, triton.cdiv(num_programs, num_tiles) + 1)


def _splits(num_warps: int, blocks: int, multiprocessors: int) -> int:
    """Parts of the input that are summed apart: the number that leaves the busiest multiprocessor the least to do.

    A part costs some six blocks more than it decodes; twelve warps a multiprocessor hide each other's waiting.
    """

    def cost(splits: int) -> float:
        busiest = max(12, 2 * triton.cdiv(num_warps * splits, 2 * multiprocessors))
        return busiest * (triton.cdiv(blocks, splits) + 6)

    return min(range(1, max(1, min(16, blocks // 8)) + 1), key=cost)


def specimens(capability: int) -> Iterator[Specimen]:
    """Products at a Llama-3.1-8B feed-forward shape."""
    quantised = {"code": "*u8", "absmax": "*u8"}
    quantised |= dict.fromkeys(("absmax_code", "absmax_scale", "absmax_offset"), "*fp32")
    for dtype in ("*bf16", "*fp16"):
        for rows, config in CONFIGS.items():
            constants = {"OUT": 4096, "IN": 14336, "ROWS": rows, "OUTS": config.outs, "SPLITS": 4}
            constants |= {"UNROLL": config.unroll, "HAS_BIAS": False, "PERMUTE": True}
            constants |= {"OFFSETS": False}
            pointers = {"x": dtype, **quantised, "code": "*i16", "bias": dtype, "sums": "*fp32"}
            signature = {**pointers, "num_rows": "i32", "x_stride": "i32", **dict.fromkeys(constants, "constexpr")}
            yield Specimen(parts_kernel, signature, constants, config.num_warps, config.num_stages)
        for config in chain(*FEW.values(), _SCALED):
            if capability != 90 and (config.rows > 8 or config.shares is not None or config.steps):
                continue
            constants = {"OUT": 28672, "IN": 4096, **_few_constants(config, 1, 0 if config.shares == 0 else 4)}
            constants |= {"OFFSETS": dtype == "*bf16", "HAS_BIAS": False, "TABLE": True, "DEPENDENT": capability >= 90}
            pointers = {"x": dtype, **quantised, "code": "*i16", "bias": dtype, "y": dtype, "sums": "*fp32"}
            signature = {**pointers, "arrived": "*i32", "num_rows": "i32", "x_stride": "i32:16"}
            signature |= dict.fromkeys(constants, "constexpr")
            if config.stages:
                del signature["x_stride"]
            yield Specimen(_kernel(config), signature, constants, config.num_warps, num_stages=1)
        constants = {"IN": 4096, "BLOCK": _SPREAD, "DEPENDENT": capability >= 90}
        signature = {"x": dtype, "spread": dtype, "num_rows": "i32", "x_stride": "i32:16"}
        yield Specimen(spread_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, 4, num_stages=1)
    constants = {"OUT": 4096, "SPLITS": 4, "HAS_BIAS": True, "BLOCK": _ADD}
    signature = {"sums": "*fp32", "bias": "*bf16", "y": "*bf16", "num_rows": "i32"}
    yield Specimen(
        add_parts_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, num_warps=4, num_stages=1
    )
