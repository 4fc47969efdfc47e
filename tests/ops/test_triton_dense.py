"""Norm, gated activations, embedding and page copies: small in Triton's interpreter, at full size on a GPU."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

Near = Callable[..., None]
Interpreter = Callable[[str], ModuleType]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
HALVES = [torch.bfloat16, torch.float16]


def check_norm(module: ModuleType, assert_near: Near, x: Tensor, residual: Tensor | None) -> None:
    weight = torch.randn(x.shape[-1], device=x.device).to(x.dtype)
    y, total = module.rms_norm(x, weight, 1e-5, residual)
    wide = x.double() if residual is None else x.double() + residual.double()
    assert_near(total, wide, BOUND[x.dtype])
    kept = total.double()
    assert_near(y, kept / (kept.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), BOUND[x.dtype])
    assert y.dtype == total.dtype == x.dtype and y.is_contiguous()
    again = module.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(again[0], y) and torch.equal(again[1], total), "the same batch, the same bits"


def check_gates(module: ModuleType, assert_near: Near, x: Tensor) -> None:
    gate, up = x.double().chunk(2, dim=1)
    assert_near(module.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, BOUND[x.dtype])
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    exact = 0.5 * gate * (1 + inner.tanh()) * up
    y = module.gelu_tanh_and_mul(x, deterministic=True)
    assert (y.double() - exact).norm() <= BOUND[x.dtype] * exact.norm()


def check_embedding(module: ModuleType, token: Tensor, weight: Tensor) -> None:
    assert torch.equal(module.embedding(token, weight), weight[token])


def check_copy(module: ModuleType, kv: Tensor, source: Tensor, destination: Tensor) -> None:
    wanted = kv.clone()
    wanted[destination] = kv[source]
    assert module.copy_pages(kv, source, destination) is kv
    assert torch.equal(kv, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 48), (5, 33), (2, 3, 16)], ids=str)
def test_norm_adds_the_residual_first(
    seed: int, assert_near: Near, interpreter: Interpreter, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
    check_norm(interpreter("norm"), assert_near, x, residual)
    check_norm(interpreter("norm"), assert_near, x, None)


def test_norm_takes_heads_of_wider_rows_where_they_are(seed: int, assert_near: Near, interpreter: Interpreter) -> None:
    packed = torch.full((5, 7, 8), math.nan)
    packed[:, 2:5] = torch.randn(5, 3, 8)
    check_norm(interpreter("norm"), assert_near, packed[:, 2:5], None)


def test_a_row_has_the_same_bits_in_any_company(seed: int, interpreter: Interpreter) -> None:
    module, x, weight = interpreter("norm"), torch.randn(9, 24), torch.randn(24)
    together = module.rms_norm(x, weight, 1e-6)[0]
    assert torch.equal(torch.cat([module.rms_norm(row[None], weight, 1e-6)[0] for row in x]), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (3, 66)])
def test_gates_multiply_the_halves(
    seed: int, assert_near: Near, interpreter: Interpreter, rows: int, width: int, dtype: torch.dtype
) -> None:
    check_gates(interpreter("activation"), assert_near, (torch.randn(rows, width) * 3).to(dtype))


def test_gates_take_large_and_infinite_values(interpreter: Interpreter) -> None:
    x = torch.tensor([[-1e30, -200.0, 200.0, 2.0, 2.0, 2.0]])
    module = interpreter("activation")
    assert module.silu_and_mul(x).tolist() == module.gelu_tanh_and_mul(x).tolist() == [[0.0, 0.0, 400.0]]


@pytest.mark.parametrize("width", [1, 7, 40])
def test_embedding_gathers_rows(seed: int, interpreter: Interpreter, width: int) -> None:
    check_embedding(interpreter("embedding"), torch.tensor([3, 10, 0, 3]), torch.randn(11, width))


def test_pages_are_read_before_any_is_written(seed: int, interpreter: Interpreter) -> None:
    kv = torch.randn(6, 2, 2, 1, 3)
    check_copy(interpreter("pages"), kv, torch.tensor([0, 1, 2, 5]), torch.tensor([1, 2, 0, 4]))
    many = torch.randn(80, 1, 2, 1, 2)
    check_copy(interpreter("pages"), many, torch.arange(40), torch.arange(1, 41))


def test_no_rows(interpreter: Interpreter) -> None:
    none = torch.empty(0, 8)
    assert interpreter("norm").rms_norm(none, torch.ones(8), 1e-5)[0].shape == (0, 8)
    assert interpreter("activation").silu_and_mul(none).shape == (0, 4)
    nothing = torch.empty(0, dtype=torch.int64)
    assert interpreter("embedding").embedding(nothing, torch.ones(3, 8)).shape == (0, 8)
    kv = torch.ones(2, 1, 2, 1, 2)
    assert torch.equal(interpreter("pages").copy_pages(kv, nothing, nothing), torch.ones(2, 1, 2, 1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_full_size_on_a_gpu(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import activation, embedding, norm, pages

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    for shape in ((1, 4096), (1000, 4096), (3, 1536), (37, 896), (5, 16384), (65, 28, 128)):
        check_norm(norm, assert_near, random(*shape), random(*shape))
        check_norm(norm, assert_near, random(*shape), None)
    packed = random(300, 20, 128)
    check_norm(norm, assert_near, packed[:, 3:9], None)
    for rows, width in ((1, 28672), (513, 28672), (33, 17920), (7, 4864)):
        check_gates(activation, assert_near, random(rows, width) * 3)
    for vocab, width in ((128256, 4096), (1000, 1536), (11, 7)):
        token = torch.randint(vocab, (777,), device="cuda")
        check_embedding(embedding, token, random(vocab, width))
    for count in (1, 5, 32, 100):
        order = torch.randperm(300, device="cuda")
        check_copy(pages, random(300, 16, 2, 8, 128), order[:count], order[count // 2 : count // 2 + count])
