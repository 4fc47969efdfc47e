"""Embedding, linear, norm, rotary positions and gated activations against float64 mathematics."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from peftkit_kernels import (
    copy_pages,
    embedding,
    gelu_tanh_and_mul,
    linear,
    pack_linear,
    rms_norm,
    rope_write_kv,
    silu_and_mul,
)

Near = Callable[..., None]


def test_embedding_gathers_rows(seed: int) -> None:
    weight = torch.randn(11, 7)
    token = torch.tensor([3, 10, 0, 3])
    assert torch.equal(embedding(token, weight), torch.stack([weight[3], weight[10], weight[0], weight[3]]))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 15, 16, 17, 50])
def test_linear_is_an_affine_map_of_each_row(
    seed: int, assert_near: Near, rows: int, deterministic: bool, packed: bool
) -> None:
    for out_features, in_features in ((1, 1), (33, 17), (96, 48)):
        x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
        bias = torch.randn(out_features)
        held = pack_linear(weight) if packed else weight
        exact = x.double() @ weight.double().T
        assert_near(linear(x, held, deterministic=deterministic), exact)
        # product and bias may cancel each other: the error is measured by them, not by their sum
        error = linear(x, held, bias, deterministic=deterministic).double() - exact - bias.double()
        assert error.norm() <= 1e-5 * (exact.norm() + bias.double().norm() * max(rows, 1) ** 0.5)


def test_packing_leaves_other_dtypes_alone(seed: int) -> None:
    weight = torch.randn(8, 8, dtype=torch.bfloat16)
    assert pack_linear(weight) is weight


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 48), (7, 3, 16)])
def test_rms_norm_adds_the_residual_first_and_returns_the_sum(
    seed: int, assert_near: Near, shape: tuple[int, ...]
) -> None:
    x, residual, weight, eps = torch.randn(shape) * 3, torch.randn(shape), torch.randn(shape[-1]), 1e-5

    def exact(total: torch.Tensor) -> torch.Tensor:
        wide = total.double()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    y, total = rms_norm(x, weight, eps, residual)
    assert torch.equal(total, x + residual)
    assert_near(y, exact(total))
    y, total = rms_norm(x, weight, eps)
    assert torch.equal(total, x)
    assert_near(y, exact(x))


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 8), (6, 2, 6), (1, 1, 2), (9, 3, 64)])
@pytest.mark.parametrize("rows", [1, 5, 21])
def test_rope_turns_queries_and_keys_and_writes_only_its_cells(
    seed: int, assert_near: Near, rows: int, heads: int, kv_heads: int, head_size: int
) -> None:
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_size)
    position = torch.randint(0, 5000, (rows,)).double()
    freq = 10000.0 ** -(torch.arange(0, head_size, 2).double() / head_size)
    angle = position[:, None] * freq
    kv = torch.full((4, 16, 2, kv_heads, head_size), float("nan"))
    cell = torch.randperm(64)[:rows]
    q = rope_write_kv(qkv, angle.cos().float(), angle.sin().float(), cell, kv)

    def turned(x: torch.Tensor) -> torch.Tensor:  # a rotation in the complex plane of (first half, second half)
        first, second = x.double().chunk(2, dim=-1)
        z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((z.real, z.imag), dim=-1)

    assert_near(q, turned(qkv[:, :heads]))
    flat = kv.view(64, 2, kv_heads, head_size)
    assert_near(flat[cell, 0], turned(qkv[:, heads : heads + kv_heads]))
    assert torch.equal(flat[cell, 1], qkv[:, heads + kv_heads :])
    untouched = torch.ones(64, dtype=torch.bool).index_fill(0, cell, False)
    assert flat[untouched].isnan().all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 2), (1, 66), (9, 46), (17, 96)])
def test_gated_activations_multiply_the_halves(
    seed: int, assert_near: Near, rows: int, width: int, deterministic: bool
) -> None:
    x = torch.randn(rows, width) * 4
    gate, up = x.double().chunk(2, dim=1)
    assert_near(silu_and_mul(x, deterministic=deterministic), gate / (1 + (-gate).exp()) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    exact = 0.5 * gate * (1 + inner.tanh()) * up
    error = (gelu_tanh_and_mul(x, deterministic=deterministic).double() - exact).norm()
    assert error <= 1e-5 * (gate * up).norm(), "1 + tanh cancels: the error is measured against what goes in"
    assert torch.equal(x[:, width // 2 :].double(), up), "the input is left as it was"


def test_pages_are_copied_as_they_were_before_any_was_written(seed: int) -> None:
    kv = torch.randn(5, 4, 2, 1, 2)
    before = kv.clone()
    copy_pages(kv, torch.tensor([0, 3]), torch.tensor([3, 1]))
    assert torch.equal(kv[3], before[0]) and torch.equal(kv[1], before[3])
    assert torch.equal(kv[[0, 2, 4]], before[[0, 2, 4]])


def test_bf16_stays_bf16_and_near(seed: int, assert_near: Near) -> None:
    x, weight = torch.randn(5, 32).bfloat16(), torch.randn(24, 32).bfloat16()
    y = linear(x, pack_linear(weight), deterministic=True)
    assert y.dtype == torch.bfloat16
    assert_near(y, x.double() @ weight.double().T, 1e-2)
    normed, _ = rms_norm(x, torch.ones(32).bfloat16(), 1e-5)
    assert normed.dtype == torch.bfloat16
    assert_near(normed, F.normalize(x.double(), dim=-1) * math.sqrt(32), 1e-2)
