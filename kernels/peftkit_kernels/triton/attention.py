"""Paged attention: which kernels a batch takes, in which configuration, and their launches.

The choice follows from shapes alone, so that a CUDA graph holds for whatever lengths it is replayed with:

    T ≤ N    every row alone (decode)
    T > N    the requests with one new row alone, the others' rows in tiles (prefill)
    deterministic    all rows by `steady_kernel`
"""
# pyright: reportCallIssue=false

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.attention_decode import decode_kernel
from peftkit_kernels.triton.attention_prefill import prefill_kernel
from peftkit_kernels.triton.attention_steady import steady_kernel
from peftkit_kernels.triton.compile import Specimen
from peftkit_kernels.triton.counts import cdiv, next_power_of_2
from peftkit_kernels.triton.dependent import begins_early, launch_options
from peftkit_kernels.triton.device import capability_of, counters_of, multiprocessors_of

Kind = Literal["few", "decode", "prefill", "steady"]
"""Few: decode of so few rows and KV heads that the shares must be many to fill the card."""

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut."""

    block_m: int
    """Rows × query heads of a tile."""
    block_n: int
    """Positions of a step."""
    num_warps: int
    num_stages: int
    per_sm: int = 0
    """Programs wanted for each multiprocessor, which the number of a row's shares follows from."""
    shares: int = 1
    """Least number of a row's shares, so that a long request among many isn't the last to end."""
    share: int = 0
    """Decode: least positions of a share, and half of those that aren't shared. Steady: positions of a span, which bits
    depend on."""


CONFIGS: Mapping[tuple[Kind, int], Config] = MappingProxyType(
    {
        ("few", 80): Config(16, 64, 4, 3, per_sm=2, share=128),
        ("few", 90): Config(16, 64, 4, 3, per_sm=1, share=128),
        ("few", 100): Config(16, 64, 4, 3, per_sm=2, share=128),
        ("decode", 80): Config(16, 32, 1, 4, per_sm=2, shares=4, share=256),
        ("decode", 90): Config(16, 32, 1, 3, per_sm=2, shares=4, share=2048),
        ("decode", 100): Config(16, 32, 1, 4, per_sm=2, shares=4, share=256),
        ("prefill", 80): Config(128, 32, 8, 3),
        ("prefill", 90): Config(128, 128, 8, 2),
        ("prefill", 100): Config(128, 64, 8, 3),
        ("steady", 80): Config(64, 64, 8, 2, per_sm=2, share=1024),
        ("steady", 90): Config(64, 64, 8, 2, per_sm=2, share=1024),
        ("steady", 100): Config(64, 64, 8, 2, per_sm=2, share=1024),
    }
)
"""(kind, compute capability) → configuration, for heads of 256 bytes; another card takes the newest row before it."""

_OVERRIDE: ContextVar[Config | None] = ContextVar("attention config", default=None)
_COUNTERS = 1 << 16
_MAX_EARLY = 32
"""Rows of a decode step that begins early: many long ones took a third longer so, one call behind the other."""


def candidates(kind: Kind) -> list[Config]:
    """Configurations worth timing."""
    if kind in ("few", "decode"):
        cuts = (
            (32, 1, 3),
            (32, 1, 4),
            (32, 1, 5),
            (64, 1, 3),
            (64, 2, 3),
            (64, 2, 4),
            (64, 4, 3),
            (64, 4, 4),
            (128, 4, 3),
        )
        splits = ((1, 1, 128), (1, 1, 256), (2, 1, 128), (4, 1, 64), (2, 4, 256), (2, 4, 2048), (2, 4, 8192))
        return [Config(16, *cut, *split) for cut, split in product(cuts, splits)]
    if kind == "prefill":
        tiles = ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4))
        return [Config(*tile) for tile in (*tiles, (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2))]
    steady = CONFIGS["steady", 90]
    cuts = product((32, 64, 128), (4, 8), (2, 3))
    return [replace(steady, block_n=n, num_warps=warps, num_stages=stages) for n, warps, stages in cuts]


@contextmanager
def override(config: Config) -> Iterator[None]:
    """Takes `config` for every launch inside; its kind is the caller's to match."""
    token = _OVERRIDE.set(config)
    try:
        yield
    finally:
        _OVERRIDE.reset(token)


def paged_attention(
    q_TQD: Tensor,
    kv_PZ2KD: Tensor,
    page_NM: Tensor,
    cu_seqlens_N1: Tensor,
    context_N: Tensor,
    num_virtual_N: Tensor,
    *,
    scale: float,
    window: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """As `reference.paged_attention`. Rows behind the last request's are left as they are."""
    num_rows, num_requests = q_TQD.shape[0], page_NM.shape[0]
    out_TQD = q_TQD.new_empty(q_TQD.shape)
    if not num_rows or not num_requests:
        return out_TQD
    if q_TQD.stride()[1:] != (q_TQD.shape[2], 1):
        q_TQD = q_TQD.contiguous()
    batch = _Batch(q_TQD, kv_PZ2KD, page_NM, cu_seqlens_N1, context_N, num_virtual_N, out_TQD, scale, window)
    if deterministic:
        _steady(batch)
    elif num_rows <= num_requests:
        _decode(batch, each_row=True)
    else:
        if num_requests > 1:
            _decode(batch, each_row=False)
        _prefill(batch, min_rows=2 if num_requests > 1 else 1)
    return out_TQD


@dataclass(frozen=True, slots=True)
class _Batch:
    """A call's tensors, and what all kernels are told of them."""

    q: Tensor
    kv: Tensor
    page: Tensor
    cu_seqlens: Tensor
    context: Tensor
    num_virtual: Tensor
    out: Tensor
    scale: float
    window: int | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.kv, self.page, self.cu_seqlens, self.context, self.num_virtual, self.out

    def numbers(self, *others: int, first: Sequence[int] = ()) -> tuple[float, ...]:
        """In the kernels' order; `first` and `others` stand before and behind the block table's stride."""
        return self.page.shape[0], *first, self.page.stride(0), *others, self.scale * LOG2_E, self.window or 0

    @property
    def num_kv(self) -> int:
        return self.kv.shape[3]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv

    @property
    def constants(self) -> dict[str, int | bool]:
        return _constants(
            self.kv.shape[1], self.num_kv, self.group, self.q.shape[2], self.q.stride(0), self.window is not None
        )

    def config(self, kind: Kind) -> Config:
        return _config(kind, capability_of(self.q.device, 0), self.q.shape[2], self.q.element_size())

    def num_shares(self, rows: int, config: Config) -> int:
        """Programs for each row and KV head: enough for the card, none for fewer than `share` positions."""
        wanted = cdiv(multiprocessors_of(self.q.device) * config.per_sm, rows * self.num_kv)
        return max(1, min(max(wanted, config.shares), cdiv(self.page.shape[1] * self.kv.shape[1], config.share)))

    def partial(self, rows: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sums, maxima and sums of weights of each row's parts, and the counters of finished shares."""
        lines = rows * self.num_kv * parts * self.group
        widths = (_block_d(self.q.shape[2]), 2)
        part, stat = (self.q.new_empty(lines * width, dtype=torch.float32) for width in widths)
        return part, stat, counters_of("paged_attention", _COUNTERS, self.q.device)


def _decode(batch: _Batch, *, each_row: bool) -> None:
    rows = batch.q.shape[0] if each_row else batch.page.shape[0]
    few = rows * batch.num_kv < 2 * multiprocessors_of(batch.q.device)
    config = batch.config("few" if few else "decode")
    shares = batch.num_shares(rows, config) if rows * batch.num_kv <= _COUNTERS else 1
    dependent = each_row and rows <= _MAX_EARLY and begins_early(batch.q.device, rows)
    constants = _decode_constants(batch.constants, config, each_row, dependent)
    _launch_decode(
        (batch.num_kv, rows, shares),
        (*batch.tensors, *batch.partial(rows if shares > 1 else 0, shares)),
        batch.numbers(config.share),
        (),
        (*constants.values(),),
        config.num_warps,
        num_stages=config.num_stages,
        **launch_options(dependent),
    )


def _prefill(batch: _Batch, *, min_rows: int) -> None:
    config = batch.config("prefill")
    tiles = batch.q.shape[0] // (config.block_m // batch.group) + batch.page.shape[0]
    constants = _prefill_constants(batch.constants, config)
    _launch_prefill(
        (batch.num_kv, tiles),
        batch.tensors,
        batch.numbers(first=(min_rows,)),
        (),
        (*constants.values(),),
        config.num_warps,
        num_stages=config.num_stages,
    )


def _steady(batch: _Batch) -> None:
    config = batch.config("steady")
    requests = batch.page.shape[0]
    tiles = batch.q.shape[0] // (config.block_m // batch.group) + requests
    shares = batch.num_shares(requests, config) if requests * batch.num_kv <= _COUNTERS else 1
    spans = cdiv(batch.page.shape[1] * batch.kv.shape[1], config.share)
    constants = _steady_constants(batch.constants, config)
    _launch_steady(
        (batch.num_kv, shares, tiles),
        (*batch.tensors, *batch.partial(requests if shares > 1 else 0, spans)),
        batch.numbers(spans),
        (),
        (*constants.values(),),
        config.num_warps,
        num_stages=config.num_stages,
    )


_launch_decode, _launch_prefill, _launch_steady = Again(decode_kernel), Again(prefill_kernel), Again(steady_kernel)


def _constants(page: int, num_kv: int, group: int, head: int, q_stride: int, window: bool) -> dict[str, int | bool]:
    """What the three kernels are compiled for, beside their configuration."""
    return {
        "Q_STRIDE": q_stride,
        "NUM_KV": num_kv,
        "GROUP": group,
        "HEAD": head,
        "BLOCK_D": _block_d(head),
        "PAGE": page,
        "WINDOW": window,
    }


def _block_d(head: int) -> int:
    """Columns of a tile; a product takes no fewer than 16."""
    return max(16, next_power_of_2(head))


def _decode_constants(
    constants: Mapping[str, int | bool], config: Config, each_row: bool, dependent: bool
) -> dict[str, int | bool]:
    group_2 = next_power_of_2(constants["GROUP"])
    mine = {
        **constants,
        "GROUP_2": group_2,
        "BLOCK_M": max(config.block_m, group_2),
        "BLOCK_N": config.block_n,
        "FOLD": max(1, config.num_warps * 2048 // (group_2 * constants["BLOCK_D"])),  # 64 registers a thread
        "EACH_ROW": each_row,
        "DEPENDENT": dependent,
    }
    return _ordered(decode_kernel, mine)


def _prefill_constants(constants: Mapping[str, int | bool], config: Config) -> dict[str, int | bool]:
    """Under a window every step is masked, and the masks take the registers of the widest steps."""
    block_n = min(config.block_n, 64) if constants["WINDOW"] else config.block_n
    return _ordered(prefill_kernel, {**constants, "BLOCK_M": config.block_m, "BLOCK_N": block_n})


def _steady_constants(constants: Mapping[str, int | bool], config: Config) -> dict[str, int | bool]:
    cut = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPAN": config.share}
    return _ordered(steady_kernel, {**constants, **cut})


def _ordered(kernel: Any, constants: Mapping[str, int | bool]) -> dict[str, int | bool]:
    """Constants in the order of the kernel's arguments."""
    return {name: constants[name] for name in kernel.arg_names[-len(constants) :]}


def _config(kind: Kind, capability: int, head: int, element_bytes: int) -> Config:
    """The override, or the table's row, with fewer positions a step for heads of more than 256 bytes. float32 has no
    tensor cores, and a tile of its own, small enough for registers."""
    chosen = _OVERRIDE.get()
    if chosen is not None:
        return chosen
    known = [card for row, card in CONFIGS if row == kind]
    config = CONFIGS[kind, max((card for card in known if card <= capability), default=min(known))]
    if element_bytes > 2:
        return replace(config, block_m=min(config.block_m, 32), block_n=16, num_warps=4, num_stages=2)
    return replace(config, block_n=max(16, config.block_n * 128 // max(128, next_power_of_2(head))))


_INTEGERS = ("page", "cu_seqlens", "context", "virtual", "arrived")
_NUMBERS = ("num_requests", "min_rows", "table_stride", "max_spans", "min_share", "window")
_SPECIMENS = (("*bf16", 8, 4, 128, False), ("*bf16", 8, 4, 128, True), ("*fp16", 2, 6, 128, False))


def specimens(capability: int = 90) -> Iterator[Specimen]:
    """The kernels as a card runs them: Llama 8B's heads without and with a window, Qwen 1.5B's."""
    for dtype, num_kv, group, head, window in _SPECIMENS:
        constants = _constants(16, num_kv, group, head, num_kv * group * head, window)
        configs = [_config(kind, capability, head, 2) for kind in ("decode", "few", "prefill", "steady")]
        *decodes, prefill, steady = configs
        for decode in decodes:
            cut = _decode_constants(constants, decode, not window, capability >= 90)
            yield _specimen(decode_kernel, dtype, cut, decode)
        cut = _prefill_constants(constants, prefill)
        yield _specimen(prefill_kernel, dtype, cut, prefill)
        cut = _steady_constants(constants, steady)
        yield _specimen(steady_kernel, dtype, cut, steady)


def _specimen(kernel: Any, dtype: str, constants: Mapping[str, Any], config: Config) -> Specimen:
    types = {"q": dtype, "kv": dtype, "out": dtype, "part": "*fp32", "stat": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(_INTEGERS, "*i32") | dict.fromkeys(_NUMBERS, "i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    return Specimen(kernel, signature, constants, config.num_warps, config.num_stages)
