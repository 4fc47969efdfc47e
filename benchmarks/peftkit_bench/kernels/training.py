"""Cases of training's operations, forward alone and with backward, beside the same in plain PyTorch and Liger's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import peftkit_kernels as ops
from peftkit.train.loss import projected_loss_sum
from peftkit_bench.kernels.case import Case, Floor, Goal, NotInstalled, Work, num_sets, share_of_floor
from peftkit_bench.timing import Call

_ROWS = 8192
_HEAD = 128
_MODELS = {"8B": (4096, 14336, 32, 8, 128256), "1.5B": (1536, 8960, 12, 2, 151936)}
"""Model → hidden, feed-forward width, query heads, KV heads, vocabulary."""
_EPS = 1e-5
_SHARE = 0.8
_OVER_PRODUCTS = 1.15
"""The loss's time over that of its two matrix products."""

Operation = Callable[..., Tensor | tuple[Tensor, ...]]
Inputs = tuple[list[Tensor], tuple[Any, ...]]
"""What gets a gradient, and what comes behind it."""


def cases() -> Iterator[Case]:
    """By model and operation; bytes are those of forward and of backward, in tensors of bfloat16."""
    for model, (hidden, width, num_q, num_k, vocabulary) in _MODELS.items():
        size, angles = _ROWS * hidden, 2 * _ROWS * _HEAD
        norm = partial(_shaped, 1, (_ROWS, hidden), (hidden,))
        yield from _both(model, "norm", {"hidden": hidden}, (2 * size, 3 * size), norm)
        size = _ROWS * num_q * _HEAD
        norm = partial(_shaped, 1, (_ROWS, num_q, _HEAD), (_HEAD,))
        yield from _both(model, "norm", {"heads": num_q}, (2 * size, 3 * size), norm)
        size = 2 * _ROWS * (num_q + num_k) * _HEAD + angles
        yield from _both(model, "rotation", {"heads": f"{num_q}+{num_k}"}, (size, size), partial(_heads, num_q, num_k))
        size = _ROWS * width
        gate = partial(_shaped, 2, (_ROWS, width), None)
        yield from _both(model, "gate", {"width": width}, (3 * size, 5 * size), gate)
        yield _cross_entropy(model, vocabulary)
        yield _loss(model, vocabulary, hidden)


def _both(
    model: str, name: str, sizes: Mapping[str, Any], elements: tuple[int, int], inputs: Callable[[], Inputs]
) -> Iterator[Case]:
    for steps, count in (("forward", elements[0]), ("both", sum(elements))):
        floor = Floor(2 * count)
        prepare = partial(_work, name, inputs, steps == "both", num_sets(2 * elements[0]))
        shown = {"model": model, "rows": _ROWS, **sizes, "steps": steps}
        yield Case(f"training {name}", shown, floor, share_of_floor(floor, _SHARE), prepare)


def _work(name: str, inputs: Callable[[], Inputs], backward: bool, count: int) -> Work:
    sets = [inputs() for _ in range(count)]

    def calls(operation: Operation) -> Sequence[Call]:
        pairs = zip(sets, sets[1:] + sets[:1], strict=True)
        return [partial(_run, operation, *each, other[0] if backward else None) for each, other in pairs]

    return Work(
        calls(_OURS[name]), {"pytorch": lambda: calls(_PLAIN[name]), "liger": lambda: calls(_liger(_LIGER[name]))}
    )


def _run(
    operation: Operation, trained: list[Tensor], rest: tuple[Any, ...], directions: Sequence[Tensor] | None
) -> object:
    """Forward, and with `directions`, a gradient for each output, backward too."""
    if directions is None:
        with torch.no_grad():
            return operation(*trained, *rest)
    leaves = [x.detach().requires_grad_() for x in trained]
    out = operation(*leaves, *rest)
    outputs = (out,) if isinstance(out, Tensor) else out
    return torch.autograd.grad(outputs, leaves, directions[: len(outputs)])


def _shaped(count: int, shape: tuple[int, ...], weight: tuple[int] | None) -> Inputs:
    return [_random(*shape) for _ in range(count)], () if weight is None else (_random(*weight),)


def _heads(num_q: int, num_k: int) -> Inputs:
    angle = torch.rand(_ROWS, _HEAD // 2, device="cuda").mul_(6.28).repeat(1, 2)
    tables = angle.cos().bfloat16(), angle.sin().bfloat16()
    return [_random(_ROWS, num_q, _HEAD), _random(_ROWS, num_k, _HEAD)], tables


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


# each operation, ours and others' ------------------------------------------------------------------------------------

_OURS: Mapping[str, Operation] = {
    "norm": lambda x, weight: ops.rms_norm_grad(x, weight, _EPS),
    "rotation": ops.rotate_grad,
    "gate": lambda gate, up: ops.gated_grad(gate, up, "silu"),
}


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers has it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _plain_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

    return turned(q), turned(k)


_PLAIN: Mapping[str, Operation] = {
    "norm": _plain_norm,
    "rotation": _plain_rotation,
    "gate": lambda gate, up: F.silu(gate) * up,
}


def _liger_rotation(liger: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    rotated = liger.liger_rope(q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None])
    return tuple(x.transpose(1, 2)[0] for x in rotated)


_LIGER: Mapping[str, Callable[..., Any]] = {
    "norm": lambda liger, x, weight: liger.liger_rms_norm(x, weight, _EPS, in_place=False),
    "rotation": _liger_rotation,
    "gate": lambda liger, gate, up: liger.liger_swiglu(gate, up),
}


def _liger(operation: Callable[..., Any]) -> Operation:
    try:
        from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotInstalled("liger_kernel") from error
    return partial(operation, functional)


# the loss ------------------------------------------------------------------------------------------------------------


def _cross_entropy(model: str, vocabulary: int) -> Case:
    """A chunk's step: logits are read once and become their gradient."""
    rows = 1024
    floor = Floor(4 * rows * vocabulary)
    sizes = {"model": model, "rows": rows, "vocabulary": vocabulary}
    prepare = partial(_prepare_cross_entropy, rows, vocabulary)
    return Case("training cross_entropy", sizes, floor, share_of_floor(floor, _SHARE), prepare, ("training_loss", None))


def _prepare_cross_entropy(rows: int, vocabulary: int) -> Work:
    sets = [(_random(rows, vocabulary), torch.randint(vocabulary, (rows,), device="cuda")) for _ in range(2)]

    def plain(logits: Tensor, targets: Tensor) -> object:
        leaf = logits.requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf.float(), targets, reduction="sum"), leaf)

    copies: list[tuple[Tensor, Tensor]] = [(logits.clone(), targets) for logits, targets in sets]
    return Work(
        [partial(ops.cross_entropy_grad, *each) for each in sets],
        {"pytorch": lambda: [partial(plain, *each) for each in copies]},
    )


def _loss(model: str, vocabulary: int, hidden: int) -> Case:
    """Hidden to the gradient of hidden."""
    floor = Floor(2 * (vocabulary + 2 * _ROWS) * hidden, 4 * _ROWS * vocabulary * hidden)
    goal = Goal(f"{_OVER_PRODUCTS}× the two products", share_of=("products", 1 / _OVER_PRODUCTS))
    sizes = {"model": model, "rows": _ROWS, "vocabulary": vocabulary, "hidden": hidden}
    return Case("training loss", sizes, floor, goal, partial(_prepare_loss, vocabulary, hidden))


def _prepare_loss(vocabulary: int, hidden: int) -> Work:
    head = nn.Linear(hidden, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    weight, x = head.weight, _random(_ROWS, hidden).requires_grad_()
    targets = torch.randint(vocabulary, (_ROWS,), device="cuda")

    def products() -> object:
        with torch.no_grad():
            return (x @ weight.t()) @ weight

    def calls(loss: Callable[[], Tensor]) -> Sequence[Call]:
        return [lambda: torch.autograd.grad(loss(), x)] * 2

    def liger() -> Sequence[Call]:
        fused = _liger(
            lambda functional: functional.liger_fused_linear_cross_entropy(x, weight, targets, reduction="sum")
        )
        return calls(fused)  # type: ignore[arg-type]

    def plain() -> Sequence[Call]:
        return calls(lambda: F.cross_entropy(head(x).float(), targets, reduction="sum"))

    ours = calls(lambda: projected_loss_sum(x, targets, head))
    return Work(ours, {"products": lambda: [products] * 2, "pytorch": plain, "liger": liger})
