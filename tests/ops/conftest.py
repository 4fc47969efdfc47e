"""Outputs start as NaN in every test of an operation, and errors are measured against float64."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an operation allocates without initialising it is full of NaN."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: object, **kwargs: object) -> Tensor:
            memory = allocate(*args, **kwargs)
            with torch.no_grad():  # a leaf that takes a gradient may be filled
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


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of `peftkit_kernels.triton` afresh, its kernels run by Triton's interpreter on the CPU.

    Triton looks at the environment when a function is decorated, so its own library's functions are decorated again
    too; all is as it was afterwards.
    """
    language = importlib.import_module("triton.language")
    compiled = importlib.import_module("triton.runtime.jit").JITFunction
    decorated = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    core = language.core
    patched = (language, core, language.math, core.tensor, core.dtype, core.tensor_descriptor_base)
    before = [vars(owner).copy() for owner in patched]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for owner in (language, language.standard):
        for name, function in vars(owner).copy().items():
            if isinstance(function, compiled):
                monkeypatch.setattr(owner, name, decorated(function.fn))
    for name in _kernel_modules():
        monkeypatch.delitem(sys.modules, name)
    yield lambda name: importlib.import_module(f"peftkit_kernels.triton.{name}")
    for name in _kernel_modules():
        del sys.modules[name]
    for owner, names in zip(patched, before, strict=True):  # a device function's call leaves its patches behind
        for name, value in vars(owner).copy().items():
            if name not in names:
                delattr(owner, name)
            elif value is not names[name]:
                setattr(owner, name, names[name])


def _kernel_modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("peftkit_kernels.triton")]
