"""The loss over a frozen vocabulary matrix: plain cross-entropy's value and gradient, by chunks in reused memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import peftkit.train.loss
from peftkit.train.loss import projected_loss_sum

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


class OwnForward(nn.Linear):
    """A head that the loss knows nothing of."""


def head_of(weight: Tensor, kind: type[nn.Linear] = nn.Linear, trained: bool = False) -> nn.Linear:
    head = kind(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=weight.device)
    head.weight.data.copy_(weight)
    head.weight.requires_grad_(trained)
    return head


def inputs(
    rows: int, vocabulary: int, hidden: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(vocabulary, hidden, device=device).mul_(1.5 / hidden**0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), device=device)
    return torch.randn(rows, hidden, device=device).to(dtype).requires_grad_(), targets, weight


def near(out: Tensor, ref: Tensor, bound: float) -> None:
    error = (out.double() - ref.double()).norm() / ref.double().norm()
    assert error < bound, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 12, 100])
def test_a_frozen_head_gives_plain_cross_entropy_and_its_gradient(
    seed: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peftkit.train.loss, "CHUNK_BYTES", 31 * rows * dtype.itemsize)
    hidden, targets, weight = inputs(12, 31, 8, dtype)
    ours = projected_loss_sum(hidden, targets, head_of(weight))
    exact = hidden.detach().double().requires_grad_()
    plain = F.cross_entropy(exact @ weight.double().T, targets, reduction="sum")
    near(ours, plain, BOUNDS[dtype])
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    (wanted,) = torch.autograd.grad(plain * 0.3, exact)
    near(torch.autograd.grad(ours * 0.3, hidden)[0], wanted, BOUNDS[dtype])
    with torch.no_grad():
        near(projected_loss_sum(hidden, targets, head_of(weight)), plain, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_matrix_and_any_other_head_agree(seed: int, dtype: torch.dtype) -> None:
    hidden, targets, weight = inputs(9, 50, 16, dtype)
    ours = projected_loss_sum(hidden, targets, head_of(weight))
    for other in (head_of(weight, OwnForward), head_of(weight, trained=True)):
        theirs = projected_loss_sum(hidden, targets, other)
        near(ours, theirs, BOUNDS[dtype])
        (wanted,) = torch.autograd.grad(theirs, hidden)
        near(torch.autograd.grad(ours, hidden, retain_graph=True)[0], wanted, BOUNDS[dtype])


def test_what_a_head_does_besides_is_kept(seed: int) -> None:
    hidden, targets, weight = inputs(9, 50, 16, torch.float32)
    plain = projected_loss_sum(hidden, targets, head_of(weight))
    hooked, replaced = head_of(weight), head_of(weight)
    hooked.register_forward_hook(lambda _, __, logits: logits * 2)
    replaced.forward = lambda x: F.linear(x * 2, weight)  # type: ignore[method-assign]
    doubled = F.cross_entropy(2 * hidden @ weight.T, targets, reduction="sum")
    for head in (hooked, replaced):
        near(projected_loss_sum(hidden, targets, head), doubled, 1e-6)
    assert (plain - doubled).abs() > 1e-3 * doubled


def test_logits_of_a_frozen_head_live_in_one_chunks_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peftkit.train.loss, "CHUNK_BYTES", 50 * 4 * 3)
    places: list[int] = []
    real: Callable[..., Tensor] = peftkit.train.loss.cross_entropy_grad

    def watched(logits: Tensor, targets: Tensor) -> Tensor:
        places.append(logits.data_ptr())
        return real(logits, targets)

    monkeypatch.setattr(peftkit.train.loss, "cross_entropy_grad", watched)
    hidden, targets, weight = inputs(10, 50, 16, torch.float32)
    projected_loss_sum(hidden, targets, head_of(weight))
    assert len(places) == 4 and len(set(places)) == 1


def test_a_loss_without_data(seed: int) -> None:
    head = head_of(torch.randn(50, 16))
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(10, 16, requires_grad=True)
        loss = projected_loss_sum(hidden, torch.empty(10, dtype=torch.int64), head)
        assert loss.shape == () and torch.autograd.grad(loss, hidden)[0].shape == (10, 16)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocabulary", "width"), [(8192, 128256, 4096), (8000, 151936, 1536), (7, 50257, 768)])
def test_the_loss_of_a_large_vocabulary_fits_in_a_gibibyte(seed: int, rows: int, vocabulary: int, width: int) -> None:
    hidden, targets, weight = inputs(rows, vocabulary, width, torch.bfloat16, "cuda")
    head = head_of(weight)
    for _ in range(2):  # once for the libraries' own memory
        hidden.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = projected_loss_sum(hidden, targets, head)
        (loss / rows).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1 << 30, f"{peak / 2**20:.0f} MiB"
    assert hidden.grad is not None
    wanted, summed = torch.empty_like(hidden, dtype=torch.float32), 0.0
    for part in torch.arange(rows, device="cuda").split(1024):
        exact = hidden.detach()[part].float().requires_grad_()
        plain = F.cross_entropy(exact @ weight.float().T, targets[part], reduction="sum")
        wanted[part] = torch.autograd.grad(plain / rows, exact)[0]
        summed += plain.item()
    assert loss.item() == pytest.approx(summed, rel=1e-3)
    near(hidden.grad, wanted, 1e-2)
    with torch.no_grad():
        assert projected_loss_sum(hidden, targets, head).item() == pytest.approx(summed, rel=1e-3)
