"""Dropout from a seed: its statistics, its gradient and the same mask in every implementation."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from peftkit_kernels.dropout import seeded_dropout

Interpreter = Callable[[str], ModuleType]


def a_seed() -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, ())


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_a_share_is_dropped_everywhere_alike_and_the_rest_scaled(seed: int, share: float) -> None:
    y = seeded_dropout(torch.ones(400, 512), a_seed(), share)
    dropped = (y == 0).double()
    assert bool((y[y != 0] == torch.tensor(1.0) / (1.0 - share)).all())
    for means, count in ((dropped.mean(), y.numel()), (dropped.mean(0), 400), (dropped.mean(1), 512)):
        assert bool(((means - share).abs() <= 5.5 * (share * (1 - share) / count) ** 0.5).all())


def test_neighbours_rows_and_seeds_are_independent(seed: int) -> None:
    first = a_seed()
    masks = [seeded_dropout(torch.ones(500, 400), key, 0.5) == 0 for key in (first, first + 1, first ^ 2**40)]
    pairs = [
        (masks[0], masks[1]),
        (masks[0], masks[2]),
        (masks[0][1:], masks[0][:-1]),
        (masks[0][:, 1:], masks[0][:, :-1]),
    ]
    for one, other in pairs:
        assert abs(float((one == other).double().mean()) - 0.5) < 5.5 * 0.5 / one.numel() ** 0.5


def test_one_seed_gives_one_mask_for_values_and_gradients(seed: int) -> None:
    x, key = torch.randn(7, 33), a_seed()
    y, dx = seeded_dropout(x, key, 0.4), seeded_dropout(torch.ones(7, 33), key, 0.4)
    torch.testing.assert_close(y, x * dx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (5, 64)])
def test_the_kernel_has_the_references_mask(
    seed: int, interpreter: Interpreter, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, key = torch.randn(shape).to(dtype), a_seed()
    torch.testing.assert_close(interpreter("dropout").seeded_dropout(x, key, 0.3), seeded_dropout(x, key, 0.3))


def test_what_it_does_not_take_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="share is"):
        seeded_dropout(torch.ones(2, 2), a_seed(), 1.0)
    with pytest.raises(ValueError, match="seed is"):
        seeded_dropout(torch.ones(2, 2), torch.ones(()), 0.5)
    with pytest.raises(ValueError, match="x_NI is"):
        seeded_dropout(torch.ones(2), a_seed(), 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_size_on_a_gpu(seed: int, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import dropout

    x, key = torch.randn(4096, 14336).to(dtype), a_seed()
    y = dropout.seeded_dropout(x.cuda(), key.cuda(), 0.05).cpu()
    torch.testing.assert_close(y, seeded_dropout(x, key, 0.05))
