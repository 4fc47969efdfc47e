"""Paged attention against float64 softmax over the positions that a token may see."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from peftkit_kernels import paged_attention, reference

NAN = float("nan")
PAGE = 16


@dataclass
class Case:
    """Requests whose keys and values are scattered over pages; all else in the pages is NaN."""

    q: Tensor
    kv: Tensor
    page: Tensor
    cu_seqlens: Tensor
    context: Tensor
    num_virtual: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def run(self, *, window: int | None = None, deterministic: bool = False) -> Tensor:
        scale = self.q.shape[2] ** -0.5
        metadata = (self.page, self.cu_seqlens, self.context, self.num_virtual)
        return paged_attention(self.q, self.kv, *metadata, scale=scale, window=window, deterministic=deterministic)

    def exact(self, window: int | None = None) -> Tensor:
        rows: list[Tensor] = []
        for n, (start, end) in enumerate(zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False)):
            context, virtual = int(self.context[n]), int(self.num_virtual[n])
            for i in range(int(end - start)):
                position = context - int(end - start) + i
                seen = [j for j in range(position + 1) if window is None or j > position - window or j < virtual]
                rows.append(self._row(self.q[int(start) + i], self.keys[n][seen], self.values[n][seen]))
        return torch.stack(rows)

    def _row(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[0] // k.shape[1]
        scores = torch.einsum("hd,chd->hc", q.double(), k.double().repeat_interleave(group, 1)) / q.shape[1] ** 0.5
        return torch.einsum("hc,chd->hd", scores.softmax(-1), v.double().repeat_interleave(group, 1))


def make_case(
    requests: Sequence[tuple[int, int]],
    virtual: Sequence[int] = (),
    *,
    heads: int = 6,
    kv_heads: int = 2,
    size: int = 8,
) -> Case:
    """requests: (new tokens, positions before them)."""
    contexts = [new + before for new, before in requests]
    num_pages = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(num_pages) + 3).tolist()
    kv = torch.full((len(order), PAGE, 2, kv_heads, size), NAN)
    page = torch.full((len(requests), max(num_pages)), -7, dtype=torch.int32)
    keys, values = [], []
    for n, context in enumerate(contexts):
        pages = [order.pop() for _ in range(num_pages[n])]
        page[n, : len(pages)] = torch.tensor(pages)
        keys.append(torch.randn(context, kv_heads, size))
        values.append(torch.randn(context, kv_heads, size))
        for j in range(context):
            kv[pages[j // PAGE], j % PAGE, 0], kv[pages[j // PAGE], j % PAGE, 1] = keys[n][j], values[n][j]
    new = torch.tensor([0, *(count for count, _ in requests)])
    return Case(
        q=torch.randn(int(new.sum()), heads, size),
        kv=kv,
        page=page,
        cu_seqlens=new.cumsum(0).int(),
        context=torch.tensor(contexts, dtype=torch.int32),
        num_virtual=torch.tensor([*virtual, *[0] * (len(requests) - len(virtual))], dtype=torch.int32),
        keys=keys,
        values=values,
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_mixed_chunks_and_single_tokens_see_their_own_past_and_nothing_else(
    seed: int, assert_near: Callable[..., None], heads: tuple[int, int], deterministic: bool
) -> None:
    requests = [(1, 0), (5, 0), (1, 15), (1, 16), (16, 16), (1, 40), (3, 30), (1, 17), (33, 2)]
    case = make_case(requests, heads=heads[0], kv_heads=heads[1])
    assert_near(case.run(deterministic=deterministic), case.exact())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_a_window_hides_old_text_but_never_virtual_tokens(
    seed: int, assert_near: Callable[..., None], window: int, deterministic: bool
) -> None:
    case = make_case([(1, 50), (7, 20), (1, 3), (20, 0), (1, 33), (4, 21)], virtual=[20, 0, 2, 20, 0, 7])
    assert_near(case.run(window=window, deterministic=deterministic), case.exact(window))


@pytest.mark.parametrize("deterministic", [False, True])
def test_random_ragged_batches(seed: int, assert_near: Callable[..., None], deterministic: bool) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        requests = [(rng.choice([1, 1, rng.randint(1, 40)]), rng.randint(0, 60)) for _ in range(rng.randint(1, 7))]
        virtual = [rng.randint(0, before) for _, before in requests]
        case = make_case(requests, virtual)
        window = rng.choice([None, rng.randint(1, 50)])
        assert_near(case.run(window=window, deterministic=deterministic), case.exact(window))


@pytest.mark.parametrize("gather_bytes", [1, 4 << 20])
@pytest.mark.parametrize("window", [None, 30])
def test_single_tokens_near_and_far(
    seed: int, assert_near: Callable[..., None], monkeypatch: pytest.MonkeyPatch, window: int | None, gather_bytes: int
) -> None:
    monkeypatch.setattr(reference, "_GATHER_BYTES", gather_bytes)
    befores = [0, 30, 31, 32, 100, 120, 190, 191, 192, 255, 300]
    case = make_case([(1, before) for before in random.sample(befores, len(befores))], virtual=[0, 0, 0])
    assert_near(case.run(window=window), case.exact(window))


def test_a_request_without_new_tokens_is_passed_over(seed: int, assert_near: Callable[..., None]) -> None:
    case = make_case([(2, 3), (0, 9), (1, 4)])
    assert_near(case.run(), case.exact())


def test_infinite_values_of_one_request_stay_its_own(seed: int, assert_near: Callable[..., None]) -> None:
    case = make_case([(1, 9), (1, 30), (1, 12)])
    exact = case.exact()
    case.kv[case.page[1, 0].item()] = float("inf")
    y = case.run()
    assert_near(y[[0, 2]], exact[[0, 2]])
