"""Cases of the operations on rows sorted by adapter, beside vLLM's LoRA kernels and gather-and-bmm."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import peftkit_kernels as ops
from peftkit_bench.kernels.case import ROTATED_BYTES, Case, Floor, Goal, NotInstalled, Work, num_sets
from peftkit_bench.timing import Call

LAYERS = {
    ("8B", "qkv"): (4096, (4096, 1024, 1024)),
    ("8B", "o"): (4096, (4096,)),
    ("8B", "gate_up"): (4096, (14336, 14336)),
    ("8B", "down"): (14336, (4096,)),
    ("1.5B", "qkv"): (1536, (1536, 256, 256)),
    ("1.5B", "gate_up"): (1536, (8960, 8960)),
}
"""Model and linear → in features, out features of its projections."""

_ALL = ((1, 1, 16), (8, 8, 16), (64, 1, 16), (64, 8, 16), (64, 64, 8), (64, 64, 16), (64, 64, 128), (256, 64, 16))
_PREFILL = ((2048, 8, 16), (2048, 8, 64), (4096, 1, 64), (4096, 64, 16))
_SOME = ((1, 1, 16), (64, 64, 16), (2048, 8, 16))
POINTS = {
    ("8B", "qkv"): (*_ALL, *_PREFILL),
    ("8B", "gate_up"): (*_ALL, *_PREFILL),
    ("8B", "o"): _SOME,
    ("8B", "down"): (*_SOME, (64, 8, 64)),
    ("1.5B", "qkv"): _SOME,
    ("1.5B", "gate_up"): _SOME,
}
"""Model and linear → (rows, adapters, rank); "mixed" is 8, 16, 32, 64 and 128 in turn."""
_MIXED = (8, 16, 32, 64, 128)
_QUICK = ((1, 1, 16), (64, 64, 16), (2048, 8, 16))
_BMM_ROWS = 256
"""Most rows for gather-and-bmm, which copies both matrices for each."""
_PEER_BYTES = 4 << 30
_TINY = 1e-6
"""Scale of a bottleneck whose output is its next input: it stays finite over thousands of calls."""


Pair = tuple[Tensor, Tensor]
"""x and y of a call."""


@dataclass(frozen=True)
class Shape:
    """A grouped LoRA call."""

    in_features: int
    out_features: tuple[int, ...]
    rows: int
    ranks: tuple[int, ...]
    """Of each adapter; row t has adapter t mod their number."""
    prompt: int = 0
    """The last rows, which are all of the first adapter."""

    @property
    def adapters(self) -> int:
        return len(self.ranks)

    @property
    def slots(self) -> list[int]:
        """The adapter of each row."""
        return [t % self.adapters for t in range(self.rows - self.prompt)] + [0] * self.prompt

    @property
    def elements(self) -> int:
        """Of one set of adapters."""
        return sum(self.ranks) * (self.in_features * len(self.out_features) + sum(self.out_features))

    @property
    def floor(self) -> Floor:
        per_rank = self.in_features * len(self.out_features) + sum(self.out_features)
        activations = 2 * self.rows * (self.in_features + 2 * sum(self.out_features))
        rank_rows = sum(self.ranks[slot] for slot in self.slots)
        return Floor(2 * self.elements + activations, 2 * rank_rows * per_rank)


def cases() -> Iterator[Case]:
    """LoRA on each linear, then bottleneck adapters."""
    for (model, linear), points in POINTS.items():
        in_features, out_features = LAYERS[model, linear]
        for rows, adapters, rank in points:
            yield _lora(model, linear, Shape(in_features, out_features, rows, (rank,) * adapters), rank)
    in_features, out_features = LAYERS["8B", "qkv"]
    yield _lora("8B", "qkv", Shape(in_features, out_features, 64, (_MIXED * 13)[:64]), "mixed")
    for linear in ("qkv", "o"):  # a step of many adapters' single rows and a prompt
        in_features, out_features = LAYERS["8B", linear]
        yield _lora("8B", linear, Shape(in_features, out_features, 512, (8,) * 256, prompt=256), 8)
    for hidden, width in ((4096, 64), (4096, 256), (1536, 64)):
        for rows, adapters in ((1, 1), (64, 8), (64, 64), (2048, 8)):
            yield _bottleneck(hidden, width, rows, adapters)


def _goal(floor: Floor, *beats: str) -> Goal:
    ahead = f", ahead of {' and '.join(beats)}" if beats else ""
    if floor.us < 2:
        return Goal(f"4 µs{ahead}", 4.0, beats)
    factor = 2.0 if floor.us <= 10 else 1.3
    return Goal(f"{factor:g}× floor{ahead}", factor * floor.us, beats)


def _kind(operation: Literal["lora", "bottleneck"], rows: int, adapters: int) -> str:
    from peftkit_kernels.triton.segmented import kind_of

    return kind_of(operation, num_rows=rows, num_segments=adapters)


def _lora(model: str, linear: str, shape: Shape, rank: int | str) -> Case:
    sizes = {"model": model, "linear": linear, "rows": shape.rows, "adapters": shape.adapters, "rank": rank}
    sizes |= {"prompt": shape.prompt} if shape.prompt else {}
    quick = model == "8B" and linear in ("qkv", "gate_up") and (shape.rows, shape.adapters, rank) in _QUICK
    goal, prepare = _goal(shape.floor, "vllm"), partial(_prepare_lora, shape)
    tuned = ("lora", _kind("lora", shape.rows, shape.adapters))
    return Case("grouped_lora", sizes, shape.floor, goal, prepare, tuned, quick)


def _prepare_lora(shape: Shape) -> Work:
    pairs = _activations(shape.rows, shape.in_features, sum(shape.out_features))
    sets = max(len(pairs), num_sets(2 * shape.elements))
    stride = max(shape.elements, ROTATED_BYTES // 2 // sets // 8 * 8)
    weights = _random(stride * sets)
    rows = _segments(shape.slots)
    calls = []
    for i in range(sets):
        x, y = pairs[i % len(pairs)]
        tables = (*_offsets(shape, i * stride), torch.full((len(shape.out_features), shape.adapters), -1))
        on_card = tuple(table.cuda() for table in tables)
        calls.append(partial(ops.grouped_lora, y, x, weights, *rows, *on_card, shape.out_features))
    peers = {"vllm": partial(_vllm, shape, pairs)}
    if shape.rows <= _BMM_ROWS:
        peers["gather_bmm"] = partial(_gather_bmm, shape, pairs)
    return Work(calls, peers)


def _offsets(shape: Shape, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offsets of A and B, ranks and scales by projection and adapter: an adapter's matrices lie together."""
    offset_a = torch.empty(len(shape.out_features), shape.adapters, dtype=torch.int64)
    offset_b = torch.empty_like(offset_a)
    for s, rank in enumerate(shape.ranks):
        for p, out in enumerate(shape.out_features):
            offset_a[p, s], offset_b[p, s] = start, start + rank * shape.in_features
            start += rank * (shape.in_features + out)
    rank_PS = torch.tensor(shape.ranks, dtype=torch.int32).expand(len(shape.out_features), -1).contiguous()
    return offset_a, offset_b, rank_PS, torch.full(rank_PS.shape, 0.01)


def _peer_sets(shape: Shape, rank: int) -> int:
    num_bytes = 2 * shape.adapters * rank * (shape.elements // sum(shape.ranks))
    return max(1, min(num_sets(num_bytes), _PEER_BYTES // num_bytes))


def _vllm(shape: Shape, pairs: Sequence[Pair]) -> Sequence[Call]:
    """vLLM's two kernels with a slot for each adapter, all padded to the largest rank, as its server calls them."""
    try:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise NotInstalled(f"vllm ({error})") from None
    rank, slots = max(shape.ranks), shape.adapters
    inner = torch.zeros(len(shape.out_features), shape.rows, rank, device="cuda", dtype=torch.float32)
    meta = LoRAKernelMeta.make(slots, shape.rows, "cuda")
    meta.prepare_tensors(torch.tensor(shape.slots, dtype=torch.int32, device="cuda"))
    args = meta.meta_args(shape.rows, False)

    def call(x: Tensor, y: Tensor, a: list[Tensor], b: list[Tensor]) -> None:
        inner.zero_()
        lora_shrink(x, a, inner, *args, 0.01)
        lora_expand(inner, b, y, *args, 0, True)

    calls = []
    for i in range(max(len(pairs), _peer_sets(shape, rank))):
        a = [_random(slots, 1, rank, shape.in_features) for _ in shape.out_features]
        b = [_random(slots, 1, out, rank) for out in shape.out_features]
        calls.append(partial(call, *pairs[i % len(pairs)], a, b))
    return calls


def _gather_bmm(shape: Shape, pairs: Sequence[Pair]) -> Sequence[Call]:
    rank = max(shape.ranks)
    index = torch.tensor(shape.slots, device="cuda")

    def call(x: Tensor, y: Tensor, a: list[Tensor], b: list[Tensor]) -> None:
        for part, a_SRI, b_SOR in zip(y.split(shape.out_features, dim=1), a, b, strict=True):
            part += torch.bmm(b_SOR[index], torch.bmm(a_SRI[index], x.unsqueeze(2))).squeeze(2)

    calls = []
    for i in range(max(len(pairs), _peer_sets(shape, rank))):
        a = [_random(shape.adapters, rank, shape.in_features) for _ in shape.out_features]
        b = [_random(shape.adapters, out, rank) for out in shape.out_features]
        calls.append(partial(call, *pairs[i % len(pairs)], a, b))
    return calls


def _bottleneck(hidden: int, width: int, rows: int, adapters: int) -> Case:
    elements = 2 * width * hidden + hidden + width
    floor = Floor(2 * adapters * elements + 4 * rows * hidden, 4 * rows * width * hidden)
    sizes = {"hidden": hidden, "width": width, "rows": rows, "adapters": adapters}
    prepare = partial(_prepare_bottleneck, hidden, width, rows, adapters)
    quick = (hidden, width) == (4096, 64) and adapters in (1, 64)
    tuned = ("bottleneck", _kind("bottleneck", rows, adapters))
    return Case("grouped_bottleneck", sizes, floor, _goal(floor), prepare, tuned, quick)


def _prepare_bottleneck(hidden: int, width: int, rows: int, adapters: int) -> Work:
    pairs = _activations(rows, hidden, hidden)
    elements = 2 * width * hidden + hidden + width
    elements += -elements % 8
    sets = max(len(pairs), num_sets(2 * elements * adapters))
    weights = _random(max(elements * adapters * sets, ROTATED_BYTES // 2))
    segments = _segments([t % adapters for t in range(rows)])
    widths = torch.full((adapters,), width, dtype=torch.int32, device="cuda")
    scales = torch.full((adapters,), _TINY, device="cuda")
    form = torch.tensor([0, ops.NON_LINEARITIES.index("relu"), 0], dtype=torch.int32, device="cuda")
    form = form.expand(adapters, 3).contiguous()
    stride = weights.numel() // sets // 8 * 8
    calls = []
    for i in range(sets):
        offsets = (i * stride + torch.arange(adapters) * elements).cuda()
        residual, y = pairs[i % len(pairs)]
        calls.append(partial(ops.grouped_bottleneck, y, residual, weights, *segments, offsets, widths, scales, form))
    return Work(
        calls, {"gather_bmm": partial(_bottleneck_bmm, pairs[0][1], width, adapters)} if rows <= _BMM_ROWS else {}
    )


def _bottleneck_bmm(y: Tensor, width: int, adapters: int) -> Sequence[Call]:
    rows, hidden = y.shape
    index = torch.arange(rows, device="cuda") % adapters

    def call(down: Tensor, up: Tensor, down_bias: Tensor, up_bias: Tensor) -> None:
        inner = F.relu(torch.baddbmm(down_bias[index].unsqueeze(2), down[index], y.unsqueeze(2)))
        y.add_(torch.baddbmm(up_bias[index].unsqueeze(2), up[index], inner).squeeze(2), alpha=_TINY)

    calls = []
    for _ in range(num_sets(4 * width * hidden * adapters)):
        down, up = _random(adapters, width, hidden), _random(adapters, hidden, width)
        calls.append(partial(call, down, up, _random(adapters, width), _random(adapters, hidden)))
    return calls


def _activations(rows: int, in_features: int, out_features: int) -> list[Pair]:
    """x and y, more than L2 holds where they are large; small ones stay there, as a step's do."""
    sets = num_sets(2 * rows * (in_features + out_features), most=8)
    return [(_random(rows, in_features), _random(rows, out_features)) for _ in range(sets)]


def _segments(slots: list[int]) -> tuple[Tensor, ...]:
    segments = ops.sort_by_slot(torch.tensor(slots))
    return tuple(table.cuda() for table in (segments.row_X, segments.start_G1, segments.slot_G, segments.row_slot_X))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
