"""The rotation kernel against float64: small in Triton's interpreter, at full size on a GPU."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

NAN = float("nan")


def exact(qkv: Tensor, cos: Tensor, sin: Tensor, num_kv: int) -> tuple[Tensor, Tensor]:
    """Rotated queries, and keys with values as they stand in a cell, in float64."""
    first, second = qkv.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((first * c - second * s, second * c + first * s), -1)
    num_q = qkv.shape[1] - 2 * num_kv
    return turned[:, :num_q], torch.stack((turned[:, num_q:-num_kv], qkv[:, -num_kv:].double()), 1)


def check(
    module: ModuleType, assert_near: Callable[..., None], rows: int, num_q: int, num_kv: int, size: int,
    dtype: torch.dtype, device: str = "cpu", spare: int = 0,
) -> None:  # fmt: skip
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    num_pages = rows // 16 + 2
    like = {"dtype": dtype, "device": device}
    qkv = torch.randn(rows, num_q + 2 * num_kv + spare, size, device=device).to(dtype)[:, : num_q + 2 * num_kv]
    cos, sin = torch.randn(2, rows, size // 2, device=device).to(dtype)
    cell = torch.randperm(num_pages * 16, device=device)[:rows]
    kv = torch.full((num_pages, 16, 2, num_kv, size), NAN, **like)
    q = module.rope_write_kv(qkv, cos, sin, cell, kv)
    exact_q, exact_kv = exact(qkv, cos, sin, num_kv)
    assert_near(q, exact_q, bound)
    cells = kv.flatten(0, 1)
    assert_near(cells[cell], exact_kv, bound)
    assert cells[cell][:, 1].equal(qkv[:, -num_kv:]), "values are copied bit for bit"
    untouched = torch.ones(len(cells), dtype=torch.bool, device=device).index_fill_(0, cell, False)
    assert cells[untouched].isnan().all()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("heads", "size"), [((4, 1), 8), ((9, 3), 12), ((2, 2), 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotates_and_writes_nothing_else(
    seed: int, assert_near: Callable[..., None], interpreter: Callable[[str], ModuleType], rows: int,
    heads: tuple[int, int], size: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    module = interpreter("rope")
    with module.override(module.Config(2, 4, 1)):
        check(module, assert_near, rows, *heads, size, dtype)


def test_heads_may_be_part_of_wider_rows(
    seed: int, assert_near: Callable[..., None], interpreter: Callable[[str], ModuleType]
) -> None:
    check(interpreter("rope"), assert_near, 3, 4, 2, 8, torch.float32, spare=3)


def test_infinite_values_are_copied(seed: int, interpreter: Callable[[str], ModuleType]) -> None:
    qkv, kv = torch.randn(1, 4, 8), torch.zeros(1, 16, 2, 1, 8)
    qkv[0, 3] = float("inf")
    interpreter("rope").rope_write_kv(qkv, *torch.randn(2, 1, 4), torch.tensor([3]), kv)
    assert kv[0, 3, 1].equal(qkv[0, 3:])


def test_no_rows(interpreter: Callable[[str], ModuleType]) -> None:
    empty = torch.zeros(0, 4)
    cell = torch.zeros(0, dtype=torch.int64)
    q = interpreter("rope").rope_write_kv(torch.zeros(0, 6, 8), empty, empty, cell, torch.zeros(1, 16, 2, 2, 8))
    assert q.shape == (0, 2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 1000, 8192])
@pytest.mark.parametrize(("heads", "size"), [((32, 8), 128), ((12, 2), 128), ((9, 3), 64), ((32, 32), 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_at_full_size(
    seed: int, assert_near: Callable[..., None], rows: int, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> None:
    from peftkit_kernels.triton import rope

    check(rope, assert_near, rows, *heads, size, dtype, device="cuda")
