"""Deterministic mode: a row's bits don't depend on the rows beside it, on its place, or on how chunks are cut."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from peftkit_kernels import (
    Segments,
    gelu_tanh_and_mul,
    grouped_bottleneck,
    grouped_lora,
    linear,
    pack_linear,
    paged_attention,
    rms_norm,
    rope_write_kv,
    silu_and_mul,
    sort_by_slot,
)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def mixtures(rng: random.Random, rows: int, count: int = 8) -> list[list[int]]:
    """Random choices of rows in random order, one row alone among them."""
    chosen = [rng.sample(range(rows), rng.randint(1, rows)) for _ in range(count)]
    return [*chosen, [rng.randrange(rows)]]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (10, 9), (50, 33), (3072, 576), (576, 1536)], ids=str)
def test_linear(seed: int, shape: tuple[int, int], packed: bool) -> None:
    rng = random.Random(seed)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(40, shape[1])
    held = pack_linear(weight) if packed else weight
    whole = linear(x, held, bias, deterministic=True)
    for rows in mixtures(rng, 40):
        assert torch.equal(linear(x[rows], held, bias, deterministic=True), whole[rows])


@pytest.mark.parametrize("width", [2, 62, 66, 1000, 3072])
def test_gated_activations(seed: int, width: int) -> None:
    rng = random.Random(seed)
    x = torch.randn(50, width) * 3
    for activation in (silu_and_mul, gelu_tanh_and_mul):
        whole = activation(x, deterministic=True)
        for rows in mixtures(rng, 50):
            assert torch.equal(activation(x[rows], deterministic=True), whole[rows])


@pytest.mark.parametrize("width", [1, 33, 48, 576, 4096])
def test_rms_norm(seed: int, width: int) -> None:
    rng = random.Random(seed)
    x, residual, weight = torch.randn(60, width), torch.randn(60, width), torch.randn(width)
    whole = rms_norm(x, weight, 1e-5, residual)[0]
    heads = torch.randn(60, 5, width)[:, 1:4]
    whole_heads = rms_norm(heads, weight, 1e-5)[0]
    for rows in mixtures(rng, 60):
        assert torch.equal(rms_norm(x[rows], weight, 1e-5, residual[rows])[0], whole[rows])
        assert torch.equal(rms_norm(heads[rows], weight, 1e-5)[0], whole_heads[rows])


@pytest.mark.parametrize("size", [2, 6, 64])
def test_rope(seed: int, size: int) -> None:
    rng = random.Random(seed)
    qkv, angle = torch.randn(30, 9, size), torch.rand(30, size // 2) * 100
    cos, sin = angle.cos(), angle.sin()
    kv = torch.zeros(2, 16, 2, 2, size)
    whole = rope_write_kv(qkv, cos, sin, torch.arange(30), kv)
    for rows in mixtures(rng, 30):
        other = torch.zeros_like(kv)
        assert torch.equal(rope_write_kv(qkv[rows], cos[rows], sin[rows], torch.tensor(rows), other), whole[rows])
        assert torch.equal(other.view(32, -1)[rows], kv.view(32, -1)[rows])


@pytest.mark.parametrize("ranks", [(1, 2, 3), (4, 16, 64), (0, 5, 128)], ids=str)
def test_grouped_lora(seed: int, ranks: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    in_features, out_features = rng.choice([17, 70, 72]), (40, 10)
    weights = torch.randn(100_000)
    offset_a = torch.arange(6).view(2, 3) * 16_384
    rank = torch.tensor([ranks, ranks[::-1]], dtype=torch.int32)
    offset_c = torch.tensor([[99_000, -1, 99_100], [-1, -1, 99_200]])
    tables = (offset_a, offset_a + 8192 + 1024, rank, torch.randn(2, 3), offset_c)
    slots = torch.tensor([rng.randint(-1, 2) for _ in range(60)])
    x, y = torch.randn(60, in_features), torch.randn(60, 50)

    def adapted(rows: list[int]) -> Tensor:
        segments: Segments = sort_by_slot(slots[rows])
        table = (segments.row_X, segments.start_G1, segments.slot_G, segments.row_slot_X)
        return grouped_lora(y[rows], x[rows], weights, *table, *tables, out_features, deterministic=True)

    whole = adapted(list(range(60)))
    for rows in mixtures(rng, 60):
        assert torch.equal(adapted(rows), whole[rows])


@pytest.mark.parametrize("widths", [(1, 2, 9), (0, 16, 33)], ids=str)
def test_grouped_bottleneck(seed: int, widths: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    hidden = rng.choice([17, 40, 72])
    weights = torch.randn(60_000)
    forms = [[rng.randrange(3), rng.randrange(5), rng.randrange(2)] for _ in widths]
    tables = (
        torch.arange(3) * 20_000,
        torch.tensor(widths, dtype=torch.int32),
        torch.randn(3),
        torch.tensor(forms, dtype=torch.int32),
    )
    slots = torch.tensor([rng.randint(-1, 2) for _ in range(60)])
    y, residual = torch.randn(60, hidden), torch.randn(60, hidden)

    def adapted(rows: list[int]) -> Tensor:
        segments: Segments = sort_by_slot(slots[rows])
        table = (segments.row_X, segments.start_G1, segments.slot_G, segments.row_slot_X)
        return grouped_bottleneck(y[rows], residual[rows], weights, *table, *tables, deterministic=True)

    whole = adapted(list(range(60)))
    for rows in mixtures(rng, 60):
        assert torch.equal(adapted(rows), whole[rows])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (9, 3, 64), (2, 2, 10)])
@pytest.mark.parametrize("window", [None, 20])
def test_paged_attention(seed: int, heads: int, kv_heads: int, size: int, window: int | None) -> None:
    rng = random.Random(seed)
    contexts = [rng.randint(1, 90) for _ in range(5)] + [16, 600]
    num_pages = [-(-context // 16) for context in contexts]
    keys_values = [torch.randn(pages * 16, 2, kv_heads, size) for pages in num_pages]
    queries = [torch.randn(context, heads, size) for context in contexts]

    def attend(parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Parts of requests, (request, first new position, behind the last), in pages in a new random order."""
        order = torch.randperm(sum(num_pages)).tolist()
        kv = torch.randn(len(order), 16, 2, kv_heads, size)
        tables = []
        for n, _, _ in parts:
            tables.append([order.pop() for _ in range(num_pages[n])])
            kv[tables[-1]] = keys_values[n].view(-1, 16, 2, kv_heads, size)
        widest = max(map(len, tables))
        page = torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32)
        lengths = torch.tensor([0, *(end - start for _, start, end in parts)])
        context = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        virtual = torch.tensor([3] * len(parts), dtype=torch.int32)
        q = torch.cat([queries[n][start:end] for n, start, end in parts])
        metadata = (page, lengths.cumsum(0).int(), context, virtual)
        y = paged_attention(q, kv, *metadata, scale=size**-0.5, window=window, deterministic=True)
        return list(y.split(lengths[1:].tolist()))

    whole = [attend([(n, 0, context)])[0] for n, context in enumerate(contexts)]
    for _ in range(6):
        chosen = rng.sample(range(len(contexts)), rng.randint(1, len(contexts)))
        ends = [rng.randint(1, contexts[n]) for n in chosen]
        starts = [rng.choice([end - 1, rng.randrange(end)]) for end in ends]
        parts = list(zip(chosen, starts, ends, strict=True))
        for (n, start, end), y in zip(parts, attend(parts), strict=True):
            assert torch.equal(y, whole[n][start:end]), f"request {n}, positions {start} to {end}"
