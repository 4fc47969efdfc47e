"""The kernels of training's operations against float64: small in Triton's interpreter, at full size on a GPU, where the
gradients that autograd hands out are compared too."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import peftkit_kernels as ops
from peftkit_kernels import training_steps

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

Near = Callable[..., None]
Interpreter = Callable[[str], ModuleType]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
SMALL = [torch.float32, torch.float16]
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def gradients(y: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, dy.double())


def wide(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def check_norm(module: ModuleType, near: Near, x: Tensor, dy: Tensor, weight: Tensor) -> None:
    bound = BOUND[x.dtype]
    exact_x, by = wide(x), weight.double()
    exact_y = norm(exact_x, by)
    y, scale = module.rms_norm_forward(x, weight, 1e-5)
    near(y, exact_y.detach(), bound)
    near(scale, (exact_x.detach().pow(2).mean(-1) + 1e-5).rsqrt(), 1e-5)
    assert y.dtype == x.dtype and scale.dtype == torch.float32
    (wanted,) = gradients(exact_y, dy, exact_x)
    near(module.rms_norm_backward(dy, x, weight, scale, dy), wanted + dy, bound)
    total = (x + dy).to(x.dtype)
    found = module.add_rms_norm_forward(x, dy, weight, 1e-5)
    near(found[0], norm(total.double(), by), bound)
    assert torch.equal(found[1], total)
    near(found[2], (total.double().pow(2).mean(-1) + 1e-5).rsqrt(), 1e-5)
    dx = module.rms_norm_backward(dy, x, weight, scale)
    near(dx, wanted, bound)
    assert torch.equal(dx, module.rms_norm_backward(dy, x, weight, scale)), "the same batch, the same bits"


def check_rotation(module: ModuleType, near: Near, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    wide_q, wide_k = wide(q), wide(k)
    exact = tuple(turned(x, cos.double(), sin.double()) for x in (wide_q, wide_k))
    for out, ref, x in zip(module.rotate(q, k, cos, sin), exact, (q, k), strict=True):
        near(out, ref.detach(), BOUND[q.dtype])
        assert out.dtype == x.dtype and out.is_contiguous()
    back = torch.autograd.grad(exact, (wide_q, wide_k), (q.double(), k.double()))
    for out, ref in zip(module.rotate(q, k, cos, sin, True), back, strict=True):
        near(out, ref, BOUND[q.dtype])


def check_rotation_in_place(
    module: ModuleType, near: Near, qkv: Tensor, num_k: int, cos: Tensor, sin: Tensor, dqkv: tuple[Tensor, ...]
) -> None:
    """qkv (N, Q + 2 K, D), of whose memory the rotation takes no other; gradients from anywhere."""
    sizes = (qkv.shape[1] - 2 * num_k, num_k, num_k)
    before = [x.clone() for x in qkv.split(sizes, 1)]
    q, k, v = qkv.split(sizes, 1)
    assert module.rotate_(q, k, cos, sin) is None
    assert torch.equal(v, before[2])
    fresh = module.rotate(before[0], before[1], cos, sin)
    assert torch.equal(q, fresh[0]) and torch.equal(k, fresh[1])
    back = module.rotate_back(*dqkv, cos, sin)
    assert back.shape == qkv.shape and back.is_contiguous()
    wanted = module.rotate(dqkv[0], dqkv[1], cos, sin, True)
    for out, ref in zip(back.split(sizes, 1), (*wanted, dqkv[2]), strict=True):
        assert torch.equal(out, ref)


def check_gate(module: ModuleType, near: Near, dh: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    bound = BOUND[gate.dtype]
    exact_gate, exact_up = wide(gate), wide(up)
    exact = ACTIVATE[activation](exact_gate) * exact_up
    near(module.gated(gate, up, activation), exact.detach(), bound)
    wanted = gradients(exact, dh, exact_gate, exact_up)
    for out, ref in zip(module.gated_backward(dh, gate, up, activation), wanted, strict=True):
        near(out, ref, bound)
    assert module.gated_backward_(dh, gate, up, activation) is None
    near(gate, wanted[0], bound)
    near(up, wanted[1], bound)


def check_loss(module: ModuleType, near: Near, logits: Tensor, targets: Tensor, scale: float) -> None:
    before = logits.clone()
    plain = module.cross_entropy(logits, targets)
    assert torch.equal(logits, before)
    loss = module.cross_entropy_grad(logits, targets, scale)
    assert loss.dtype == torch.float32 and torch.equal(loss, plain)
    for at in range(0, len(targets), 1024):  # float64 of all at once would be large
        part = slice(at, at + 1024)
        exact_logits = wide(before[part])
        exact = F.cross_entropy(exact_logits, targets[part], reduction="none")
        near(loss[part], exact.detach(), 1e-5)
        near(logits[part], gradients(exact, torch.full_like(exact, scale), exact_logits)[0], BOUND[logits.dtype])


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (3, 48), (5, 33), (2, 3, 16)], ids=str)
def test_norm(
    seed: int, assert_near: Near, interpreter: Interpreter, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, dy = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    check_norm(interpreter("training_norm"), assert_near, x * 3, dy, weight)
    heads = torch.randn(3, 5, shape[-1]).to(dtype)[:, 1:3]  # parts of wider rows
    check_norm(interpreter("training_norm"), assert_near, heads, torch.randn(heads.shape).to(dtype), weight)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("heads", [(1, 1, 2), (4, 1, 8), (9, 3, 12)], ids=str)
def test_rotation(
    seed: int, assert_near: Near, interpreter: Interpreter, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_q, num_k, size = heads
    packed = torch.randn(5, num_q + num_k, size).to(dtype)  # heads lie where a projection of all left them
    cos, sin = torch.randn(2, 5, size).to(dtype)
    check_rotation(interpreter("training_rope"), assert_near, packed[:, :num_q], packed[:, num_q:], cos, sin)
    swapped = packed.transpose(0, 1).contiguous().transpose(0, 1)  # as attention hands out its gradients
    check_rotation(interpreter("training_rope"), assert_near, swapped[:, :num_q], swapped[:, num_q:], cos, sin.float())


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("heads", [(1, 1, 2), (4, 1, 8), (9, 3, 12)], ids=str)
def test_rotation_in_place_and_back_side_by_side(
    seed: int, assert_near: Near, interpreter: Interpreter, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_q, num_k, size = heads
    qkv, (cos, sin) = torch.randn(5, num_q + 2 * num_k, size).to(dtype), torch.randn(2, 5, size).to(dtype)
    dqkv = tuple(torch.randn(count, 5, size).to(dtype).transpose(0, 1) for count in (num_q, num_k, num_k))
    check_rotation_in_place(interpreter("training_rope"), assert_near, qkv, num_k, cos, sin, dqkv)


def matrices(rows: tuple[int, ...], columns: int, device: str) -> tuple[tuple[Tensor, ...], ...]:
    """Random codes and scales of matrices in NF4."""
    sizes = [count * columns for count in rows]
    codes = tuple(torch.randint(256, (size // 2,), dtype=torch.uint8, device=device) for size in sizes)
    absmaxes = tuple(torch.randint(256, (size // 64,), dtype=torch.uint8, device=device) for size in sizes)
    tables = tuple(torch.randn(256, device=device) for _ in sizes)
    scales = tuple(torch.rand(-(-size // (64 * 256)), device=device) for size in sizes)
    return codes, absmaxes, tables, scales, tuple(torch.randn((), device=device) for _ in sizes)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("rows", [(128,), (128, 64), (64, 128, 192)], ids=str)
def test_matrices_dequantised_together(
    seed: int, interpreter: Interpreter, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    quantised = matrices(rows, 64, "cpu")
    wanted = training_steps.nf4_dequantize_joined(*quantised, rows, 64, dtype)
    found = interpreter("training_weights").nf4_dequantize_joined(*quantised, rows, 64, dtype)
    assert found.shape == (sum(rows), 64) and torch.equal(found, wanted)
    begins_anywhere = tuple(torch.cat([code[:1], code])[1:] for code in quantised[0])
    again = interpreter("training_weights").nf4_dequantize_joined(begins_anywhere, *quantised[1:], rows, 64, dtype)
    assert torch.equal(again, wanted)


def test_matrices_that_are_not_dequantised_together_are_refused() -> None:
    for rows, columns, message in (((64,) * 4, 64, "1 to 3 matrices"), ((64, 32), 64, "32 × 64: a multiple of 4096")):
        with pytest.raises(ValueError, match=message):
            ops.nf4_dequantize_joined(*matrices(rows, columns, "cpu"), rows, columns, torch.float32)
    *quantised, offsets = matrices((64, 64), 64, "cpu")
    with pytest.raises(ValueError, match="absmax_offset has shape"):  # one for each nested scale is a product's alone
        apart = tuple(one.expand(scales.shape) for one, scales in zip(offsets, quantised[-1], strict=True))
        ops.nf4_dequantize_joined(*quantised, apart, (64, 64), 64, torch.float32)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("activation", ACTIVATE)
def test_gate(seed: int, assert_near: Near, interpreter: Interpreter, activation: str, dtype: torch.dtype) -> None:
    module = interpreter("training_gate")
    for shape in ((1, 9), (3, 66), (2, 3, 20)):
        dh, gate, up = torch.randn(3, *shape).to(dtype)
        check_gate(module, assert_near, dh, gate * 3, up, activation)
    packed = torch.randn(5, 50).to(dtype)
    check_gate(module, assert_near, torch.randn(5, 25).to(dtype), packed[:, :25], packed[:, 25:], activation)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_gates_and_slopes_of_large_values_are_finite(interpreter: Interpreter) -> None:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e30]])
    for activation in ACTIVATE:
        dgate, dup = interpreter("training_gate").gated_backward(torch.ones(1, 5), gate, torch.ones(1, 5), activation)
        assert dgate.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]]
        assert dup.tolist() == [[0.0, 0.0, 0.0, 200.0, float(gate[0, 4])]]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 50), (2, 1500)])
def test_loss(
    seed: int, assert_near: Near, interpreter: Interpreter, rows: int, vocabulary: int, dtype: torch.dtype
) -> None:
    module = interpreter("training_loss")
    logits, targets = (torch.randn(rows, vocabulary) * 4).to(dtype), torch.randint(vocabulary, (rows,))
    if vocabulary > 1:
        logits[:, :-1] = torch.where(targets[:, None] == torch.arange(vocabulary - 1), logits[:, :-1], -torch.inf)
        logits[0] = torch.randn(vocabulary).to(dtype)
    with module.override(module.Config(num_warps=4, values=4)):
        check_loss(module, assert_near, logits, targets, 0.5)


def test_a_loss_of_rows_that_lie_apart(seed: int, assert_near: Near, interpreter: Interpreter) -> None:
    wider, targets = torch.randn(4, 70), torch.randint(50, (4,))
    kept = wider[:, 50:].clone()
    check_loss(interpreter("training_loss"), assert_near, wider[:, :50], targets, 1.0)
    assert torch.equal(wider[:, 50:], kept)


def test_no_rows(interpreter: Interpreter) -> None:
    none, heads, weight = torch.empty(0, 8), torch.empty(0, 2, 4), torch.ones(8)
    y, scale = interpreter("training_norm").rms_norm_forward(none, weight, 1e-5)
    assert interpreter("training_norm").rms_norm_backward(none, y, weight, scale).shape == (0, 8)
    assert interpreter("training_rope").rotate(heads, heads, none[:, :4], none[:, :4])[0].shape == (0, 2, 4)
    assert interpreter("training_gate").gated_backward(none, none, none, "silu")[1].shape == (0, 8)
    assert interpreter("training_loss").cross_entropy_grad(none, torch.empty(0, dtype=torch.int64)).shape == (0,)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_norm_at_full_size(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import training_norm

    for shape in ((1, 4096), (8192, 4096), (1001, 1536), (2, 37, 896), (3, 16384), (8192, 32, 128), (5, 8, 64)):
        x, dy = random(dtype, 2, *shape)
        check_norm(training_norm, assert_near, x, dy, random(dtype, shape[-1]))
    heads = random(dtype, 8192, 48, 128)[:, 32:40]
    check_norm(training_norm, assert_near, heads, random(dtype, *heads.shape), random(dtype, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_rotation_at_full_size(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import training_rope

    for rows, num_q, num_k, size in ((8192, 32, 8, 128), (1, 12, 2, 128), (4097, 9, 3, 64), (70001, 2, 1, 128)):
        packed, (cos, sin) = random(dtype, rows, num_q + num_k, size), random(torch.float32, 2, rows, size)
        check_rotation(training_rope, assert_near, packed[:, :num_q], packed[:, num_q:], cos.to(dtype), sin)
        qkv = random(dtype, rows, num_q + 2 * num_k, size)
        dqkv = tuple(random(dtype, count, rows, size).transpose(0, 1) for count in (num_q, num_k, num_k))
        check_rotation_in_place(training_rope, assert_near, qkv, num_k, cos.to(dtype), sin, dqkv)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"), [((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((1536, 256, 256), 1536)], ids=str
)
def test_matrices_dequantised_together_at_full_size(
    seed: int, rows: tuple[int, ...], columns: int, dtype: torch.dtype
) -> None:
    quantised = matrices(rows, columns, "cuda")
    found = ops.nf4_dequantize_joined(*quantised, rows, columns, dtype)
    apart = [ops.nf4_dequantize(*one, (count, columns), dtype) for *one, count in zip(*quantised, rows, strict=True)]
    assert torch.equal(found, torch.cat(apart))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_gate_at_full_size(seed: int, assert_near: Near, dtype: torch.dtype, activation: str) -> None:
    from peftkit_kernels.triton import training_gate

    for rows, width in ((8192, 14336), (1, 8960), (513, 4864), (33, 77)):
        packed, dh = random(dtype, rows, 2 * width), random(dtype, rows, width)
        check_gate(training_gate, assert_near, dh, packed[:, :width], packed[:, width:], activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_loss_at_full_size(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import training_loss

    for rows, vocabulary in ((8192, 128256), (777, 151936), (3, 262144), (64, 50257), (50, 7)):
        targets = torch.randint(vocabulary, (rows,), device="cuda")
        check_loss(training_loss, assert_near, random(dtype, rows, vocabulary) * 4, targets, 0.5)
    for config in training_loss.candidates():
        with training_loss.override(config):
            targets = torch.randint(128256, (64,), device="cuda")
            check_loss(training_loss, assert_near, random(dtype, 64, 128256), targets, 1.0)


def layer(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, plain: bool) -> Tensor:
    """All operations in one layer, N × 4096 as 32 heads of 128."""
    if plain:
        y = x + norm(x, weight)
        q, k = (turned(part.view(-1, 32, 128), cos, sin).flatten(1) for part in (norm(y, weight), y))
        return F.silu(q * 2) * (k * 2) + y
    total = ops.rms_norm_grad(x, weight, 1e-5) + x
    y = ops.rms_norm_grad(total, weight, 1e-5)
    q, k = ops.rotate_grad(y.view(-1, 32, 128), total.view(-1, 32, 128), cos, sin)
    return ops.gated_grad(q.flatten(1) * 2, k.flatten(1) * 2, "silu", overwrite=True) + total


@pytest.mark.gpu
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_layer_and_its_gradient_on_a_gpu(seed: int, assert_near: Near, dtype: torch.dtype, recomputed: bool) -> None:
    x, weight = random(dtype, 2000, 4096).requires_grad_(), random(dtype, 4096)
    angle, dy = torch.rand(2000, 128, device="cuda") * 6.28, random(dtype, 2000, 4096)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    inputs = (x, weight, cos, sin, False)
    y = checkpoint(layer, *inputs, use_reentrant=False) if recomputed else layer(*inputs)
    exact_x = wide(x)
    exact = layer(exact_x, weight.double(), cos.double(), sin.double(), True)
    bound = BOUND[dtype] * (1 if dtype == torch.float32 else 2)  # several steps, each rounded
    assert_near(y.detach(), exact.detach(), bound)
    assert_near(torch.autograd.grad(y, x, dy)[0], gradients(exact, dy, exact_x)[0], bound)


@pytest.mark.gpu
def test_a_layer_without_data_launches_nothing(seed: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2000, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight, cos, sin = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4096,), (2000, 128), (2000, 128))
        )
        y = checkpoint(layer, x, weight, cos, sin, False, use_reentrant=False)
        assert torch.autograd.grad(y.sum(), x)[0].shape == (2000, 4096)
