"""Training's operations on the reference path: values and gradients against autograd in float64 and finite differences,
and where they have to run: checkpointing, FakeTensorMode, torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import peftkit_kernels as ops
from peftkit_kernels import dispatch, training

Near = Callable[..., None]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 1e-12}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' apply_rotary_pos_emb, heads behind rows."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def compare(
    near: Near, ours: tuple[Tensor, ...], exact: tuple[Tensor, ...], pairs: list[tuple[Tensor, Tensor]]
) -> None:
    """Outputs, and the gradients of random directions for each (input, its float64 twin)."""
    bound = BOUND[ours[0].dtype]
    directions = [torch.randn(out.shape, dtype=torch.float64).to(out.dtype) for out in ours]
    for out, ref in zip(ours, exact, strict=True):
        assert out.is_contiguous()
        near(out, ref.detach(), bound)
    found = torch.autograd.grad(ours, [x for x, _ in pairs], directions)
    wanted = torch.autograd.grad(exact, [x for _, x in pairs], [direction.double() for direction in directions])
    for (x, _), gradient, ref in zip(pairs, found, wanted, strict=True):
        assert gradient.dtype == x.dtype
        near(gradient, ref, bound)


def twin(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (5, 33), (2, 3, 16)], ids=str)
def test_norm_and_its_gradient(seed: int, assert_near: Near, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = leaf(*shape, dtype=dtype), torch.randn(shape[-1]).to(dtype)
    wide = twin(x)
    compare(assert_near, (ops.rms_norm_grad(x, weight, 1e-5),), (norm(wide, weight.double()),), [(x, wide)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (5, 33), (2, 3, 16)], ids=str)
def test_norm_beside_a_residual(seed: int, assert_near: Near, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), torch.randn(shape[-1]).to(dtype)
    wide_x, wide_residual = twin(x), twin(residual)
    exact = (norm(wide_x, weight.double()), wide_x)
    compare(assert_near, ops.rms_norm_beside_grad(x, weight, 1e-5), exact, [(x, wide_x)])
    total = wide_x + wide_residual
    exact = (norm(total, weight.double()), total)
    pairs = [(x, wide_x), (residual, wide_residual)]
    compare(assert_near, ops.add_rms_norm_grad(x, residual, weight, 1e-5), exact, pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_its_gradient(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    q, k = leaf(5, 4, 8, dtype=dtype), leaf(5, 2, 8, dtype=dtype)
    cos, sin = torch.randn(2, 5, 8)  # halves that differ: no symmetry hides a wrong one
    wide_q, wide_k = twin(q), twin(k)
    exact = (turned(wide_q, cos.double(), sin.double()), turned(wide_k, cos.double(), sin.double()))
    compare(assert_near, ops.rotate_grad(q, k, cos, sin), exact, [(q, wide_q), (k, wide_k)])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_of_queries_keys_and_values_side_by_side(
    seed: int, assert_near: Near, dtype: torch.dtype, overwrite: bool
) -> None:
    qkv, (cos, sin) = leaf(2, 5, 8 * 8, dtype=dtype), torch.randn(2, 10, 8)
    wide = twin(qkv)
    q, k, v = wide.view(10, 8, 8).split((4, 2, 2), 1)
    exact = (turned(q, cos.double(), sin.double()), turned(k, cos.double(), sin.double()), v)
    before = qkv.detach().clone()
    given = qkv * 1
    ours = ops.rotate_joined_grad(given, cos, sin, 2, overwrite=overwrite)
    assert [x.shape for x in ours] == [(2, heads, 5, 8) for heads in (4, 2, 2)]
    assert torch.equal(given.detach(), before) is not overwrite
    assert (ours[2].data_ptr() - given.data_ptr() == 6 * 8 * given.element_size()) is overwrite
    directions = [torch.randn(x.shape, dtype=torch.float64).to(dtype) for x in ours]
    found = torch.autograd.grad(ours, qkv, directions)[0]
    apart = [x.view(2, 5, -1, 8).transpose(1, 2) for x in exact]
    for out, ref in zip(ours, apart, strict=True):
        assert_near(out, ref.detach(), BOUND[dtype])
    assert_near(found, torch.autograd.grad(apart, wide, [d.double() for d in directions])[0], BOUND[dtype])
    assert found.is_contiguous()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("shape", [(5, 66), (2, 3, 66)], ids=str)
def test_gate_and_up_side_by_side(
    seed: int, assert_near: Near, shape: tuple[int, ...], activation: str, overwrite: bool
) -> None:
    both = leaf(*shape, dtype=torch.float32)
    wide = twin(both)
    exact = ACTIVATE[activation](wide[..., :33]) * wide[..., 33:]
    ours = ops.gated_joined_grad(both * 1, activation, overwrite=overwrite)
    compare(assert_near, (ours,), (exact,), [(both, wide)])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_and_its_gradient(
    seed: int, assert_near: Near, dtype: torch.dtype, activation: str, overwrite: bool
) -> None:
    packed = (torch.randn(5, 66) * 3).to(dtype).requires_grad_()
    gate, up = packed[:, :33] * 1, packed[:, 33:] * 1
    wide = twin(packed)
    exact = ACTIVATE[activation](wide[:, :33]) * wide[:, 33:]
    ours = ops.gated_grad(gate, up, activation, overwrite=overwrite)
    compare(assert_near, (ours,), (exact,), [(packed, wide)])


def test_overwritten_inputs_are_not_read_again(seed: int) -> None:
    gate, up = leaf(3, 4), leaf(3, 4)
    h = ops.gated_grad(gate * 1, up * 1, "silu", overwrite=True)
    torch.autograd.grad(h.sum(), gate, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(h.sum(), gate)
    both = leaf(3, 8)
    h = ops.gated_joined_grad(both * 1, "silu", overwrite=True)
    torch.autograd.grad(h.sum(), both, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(h.sum(), both)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_cross_entropy_leaves_its_gradient_in_the_logits(
    seed: int, assert_near: Near, dtype: torch.dtype, scale: float
) -> None:
    logits, targets = (torch.randn(6, 40) * 4).to(dtype), torch.randint(40, (6,))
    logits[0, 3] = -torch.inf
    targets[0] = 1
    wide = logits.double().clone().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    (wanted,) = torch.autograd.grad(exact.sum() * scale, wide)
    before = logits.clone()
    assert_near(ops.cross_entropy(logits, targets), exact.detach(), min(BOUND[dtype], 1e-5))
    assert torch.equal(logits, before)
    loss = ops.cross_entropy_grad(logits, targets, scale)
    assert_near(loss, exact.detach(), min(BOUND[dtype], 1e-5))
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_near(logits, wanted, BOUND[dtype])


def test_gradients_agree_with_finite_differences(seed: int) -> None:
    weight, cos, sin = (torch.randn(shape, dtype=torch.float64) for shape in ((6,), (3, 6), (3, 6)))
    assert gradcheck(lambda x: ops.rms_norm_grad(x, weight, 1e-5), (leaf(3, 6),))
    assert gradcheck(lambda x: ops.rms_norm_beside_grad(x, weight, 1e-5), (leaf(3, 6),))
    assert gradcheck(lambda x, y: ops.add_rms_norm_grad(x, y, weight, 1e-5), (leaf(3, 6), leaf(3, 6)))
    assert gradcheck(lambda q, k: ops.rotate_grad(q, k, cos, sin), (leaf(3, 2, 6), leaf(3, 1, 6)))
    assert gradcheck(lambda qkv: ops.rotate_joined_grad(qkv, cos, sin, 1), (leaf(1, 3, 24),))
    for activation in ACTIVATE:
        assert gradcheck(lambda both, name=activation: ops.gated_joined_grad(both, name), (leaf(3, 8),))
        assert gradcheck(lambda g, u, name=activation: ops.gated_grad(g, u, name), (leaf(3, 4), leaf(3, 4)))


def block(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All operations in one small layer: N × 8 as 2 heads of 4."""
    total = ops.rms_norm_grad(x, weight, 1e-5) + x
    y = ops.rms_norm_grad(total, weight, 1e-5)
    q, k = ops.rotate_grad(y.view(-1, 2, 4), total.view(-1, 2, 4), cos, sin)
    return ops.gated_grad(q.flatten(1) * 2, k.flatten(1) * 2, "silu", overwrite=True) + total


def block_inputs() -> tuple[Tensor, ...]:
    return torch.randn(5, 8, requires_grad=True), torch.randn(8), torch.randn(5, 4), torch.randn(5, 4)


def test_recomputed_layers_have_the_same_gradients(seed: int) -> None:
    x, *rest = block_inputs()
    wanted = torch.autograd.grad(block(block(x, *rest), *rest).sum(), x)
    y = checkpoint(block, checkpoint(block, x, *rest, use_reentrant=False), *rest, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted[0])


def test_a_compiled_layer_is_the_eager_one(seed: int) -> None:
    x, *rest = block_inputs()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    y, wanted = compiled(x, *rest), block(x, *rest)
    assert torch.equal(y, wanted)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(wanted.sum(), x)[0])


def no_kernel(*_: object) -> None:
    raise AssertionError("a kernel met a tensor without data")


@pytest.mark.parametrize("kernel", [None, no_kernel])
def test_tensors_without_data_get_shapes_and_gradients(
    kernel: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_triton", lambda *_: kernel)
    with FakeTensorMode():
        x, weight, cos, sin = (torch.empty(shape) for shape in ((5, 8), (8,), (5, 4), (5, 4)))
        y = checkpoint(block, x.requires_grad_(), weight, cos, sin, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        loss = ops.cross_entropy_grad(torch.empty(5, 9), torch.empty(5, dtype=torch.int64))
    assert y.shape == gradient.shape == (5, 8)
    assert loss.shape == (5,) and loss.dtype == torch.float32


STEPS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rms_norm_forward": lambda: (torch.randn(3, 4), torch.randn(4), 1e-5),
    "rms_norm_backward": lambda: (*torch.randn(2, 3, 4), torch.randn(4), torch.randn(3)),
    "rotate": lambda: (torch.randn(3, 2, 4), torch.randn(3, 1, 4), *torch.randn(2, 3, 4), True),
    "gated": lambda: (*torch.randn(2, 3, 4), "silu"),
    "gated_backward": lambda: (*torch.randn(3, 3, 4), "gelu"),
    "gated_backward_": lambda: (*torch.randn(3, 3, 4).unbind(), "gelu_tanh"),
    "cross_entropy": lambda: (torch.randn(3, 4), torch.tensor([0, 3, 1])),
    "cross_entropy_grad": lambda: (torch.randn(3, 4), torch.tensor([0, 3, 1]), 0.5),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_declared_of_a_step_is_true(name: str, seed: int) -> None:
    operation = getattr(torch.ops.peftkit, name).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operation, STEPS[name](), test_utils=tests)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm_grad(torch.zeros(2, 4), leaf(4), 1e-5), "weight_H wants a gradient: a frozen one"),
        (lambda: ops.rms_norm_grad(torch.zeros(2, 4), torch.zeros(3), 1e-5), r"weight_H has shape \[3\]: \(4\)"),
        (lambda: ops.gated_grad(*torch.zeros(2, 3, 4), "relu"), "activation is relu: one of silu, gelu_tanh, gelu"),
        (
            lambda: ops.rotate_grad(torch.zeros(2, 1, 4), torch.zeros(3, 1, 4), *torch.zeros(2, 2, 4)),
            r"k_NKD has shape \[3, 1, 4\]: \(2, any, 4\)",
        ),
        (
            lambda: ops.cross_entropy_grad(torch.zeros(2, 4), torch.zeros(2)),
            "targets_N is torch.float32: torch.int64",
        ),
        (
            lambda: training.rms_norm_backward(*torch.zeros(2, 2, 4), torch.zeros(4), torch.zeros(3)),
            r"scale_N has shape \[3\]: \(2\)",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}.* is wanted$"):
        call()
