"""Cases of the steps that only move memory, beside the same in plain PyTorch."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import peftkit_kernels as ops
from peftkit_bench.kernels.case import Case, Floor, Goal, Work, num_sets, share_of_floor
from peftkit_bench.timing import Call
from peftkit_kernels import reference

_ROWS = (1, 64, 512, 4096)
_VOCABULARY = 128256
_MODELS = {"8B": (4096, 14336, 32, 8), "1.5B": (1536, 8960, 12, 2)}
"""Model → hidden, feed-forward width, query heads, KV heads of size 128."""
_EPS = 1e-5
_SHARE, _FROM_US = 0.8, 10.0


def cases() -> Iterator[Case]:
    """By kernel and model."""
    for model, (hidden, width, num_q, num_kv) in _MODELS.items():
        for rows in _ROWS if model == "8B" else (64, 4096):
            sizes = {"model": model, "rows": rows}
            yield _case("rms_norm", sizes, 8 * rows * hidden + 2 * hidden, partial(_norm, rows, hidden))
            heads = num_q + 2 * num_kv
            moved = 4 * rows * heads * 128 + 2 * rows * 128 + 8 * rows
            yield _case("rope_write_kv", sizes, moved, partial(_rope, rows, num_q, num_kv), ("rope", None))
            yield _case("silu_and_mul", sizes, 6 * rows * width, partial(_gate, rows, width))
            yield _case("embedding", sizes, 4 * rows * hidden + 8 * rows, partial(_embedding, rows, hidden))
    yield _case("gelu_tanh_and_mul", {"model": "8B", "rows": 4096}, 6 * 4096 * 14336, partial(_gate, 4096, 14336, True))
    yield _case("copy_pages", {"model": "8B", "pages": 8}, 8 * 2 * 65536, partial(_copy, 8, 8))
    for rows in (1, 64, 256):
        for how in ("greedy", "temperature", "top_k_top_p"):
            sizes = {"rows": rows, "how": how}
            yield _case("sample", sizes, 2 * rows * _VOCABULARY, partial(_sample, rows, how))


def _case(
    kernel: str, sizes: Mapping[str, Any], num_bytes: float, prepare: Any, tuned: tuple[str, None] | None = None
) -> Case:
    floor = Floor(num_bytes)
    goal: Goal | None = share_of_floor(floor, _SHARE) if floor.us > _FROM_US else None
    return Case(
        kernel, sizes, floor, goal, prepare, tuned, sizes.get("rows") in (64, 4096) and sizes.get("model") != "1.5B"
    )


def _norm(rows: int, hidden: int) -> Work:
    sets, weight = _sets(rows * hidden, rows, hidden), _random(hidden)
    calls = [(x, weight, _EPS, residual) for x, residual in zip(sets, sets[1:] + sets[:1], strict=True)]
    return _both(ops.rms_norm, reference.rms_norm, calls)


def _gate(rows: int, width: int, gelu: bool = False) -> Work:
    calls = [(x,) for x in _sets(2 * rows * width, rows, 2 * width)]
    if gelu:
        return _both(ops.gelu_tanh_and_mul, reference.gelu_tanh_and_mul, calls)
    return _both(ops.silu_and_mul, reference.silu_and_mul, calls)


def _embedding(rows: int, hidden: int) -> Work:
    weight = _random(_VOCABULARY, hidden)
    tokens = torch.randint(0, _VOCABULARY, (num_sets(2 * rows * hidden), rows), device="cuda")
    return _both(ops.embedding, reference.embedding, [(token, weight) for token in tokens])


def _rope(rows: int, num_q: int, num_kv: int) -> Work:
    heads = num_q + 2 * num_kv
    inputs = _sets(rows * heads * 128, rows, heads, 128)
    kv = _random(-(-len(inputs) * rows // 16), 16, 2, num_kv, 128)
    cells = torch.randperm(kv.shape[0] * 16, device="cuda")[: len(inputs) * rows].view(-1, rows)
    cos, sin = _random(rows, 64), _random(rows, 64)
    calls = [(x, cos, sin, cell, kv) for x, cell in zip(inputs, cells, strict=True)]
    return _both(ops.rope_write_kv, reference.rope_write_kv, calls)


def _copy(pages: int, num_kv: int) -> Work:
    kv = _random(4096, 16, 2, num_kv, 128)
    order = torch.randperm(4096, device="cuda").view(-1, 2, pages)
    return _both(ops.copy_pages, reference.copy_pages, [(kv, source, target) for source, target in order])


def _sample(rows: int, how: str) -> Work:
    full = partial(torch.full, (rows,), device="cuda")
    row = torch.arange(rows, device="cuda")
    top = how == "top_k_top_p"
    temperature = full(0.0 if how == "greedy" else 1.0)
    top_k, top_p = full(50 if top else 0, dtype=torch.int32), full(0.9 if top else 1.0)
    parameters = (temperature, top_k, top_p, full(0.0), row, row)
    calls = [partial(ops.sample, logits, *parameters) for logits in _sets(rows * _VOCABULARY, rows, _VOCABULARY)]
    return Work(calls)  # the reference draws on the host


def _both(ours: Any, plain: Any, arguments: Sequence[tuple[Any, ...]]) -> Work:
    def peer() -> Sequence[Call]:
        return [partial(plain, *values) for values in arguments]

    return Work([partial(ours, *values) for values in arguments], {"pytorch": peer})


def _sets(num_elements: int, *shape: int) -> list[Tensor]:
    return [_random(*shape) for _ in range(num_sets(2 * num_elements))]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
