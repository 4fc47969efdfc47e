"""Outputs start as NaN in every test of an operation, and errors are measured against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an operation allocates without initialising it is full of NaN."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: object, **kwargs: object) -> Tensor:
            memory = allocate(*args, **kwargs)
            return memory.fill_(float("nan")) if memory.is_floating_point() else memory

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def assert_near() -> Callable[..., None]:
    """Asserts ‖out − ref‖ / ‖ref‖ < 1e-5, the bound for float32 on the reference path; `ref` is float64."""

    def check(out: Tensor, ref: Tensor, bound: float = 1e-5) -> None:
        assert ref.dtype == torch.float64 and out.shape == ref.shape
        error = (out.double() - ref).norm() / ref.norm().clamp(min=1e-30)
        assert error < bound, f"relative error {error:.2e}"

    return check
