"""Kernels compiled on threads are those that launches find later; for compute capability 9.0, without a GPU."""
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportAttributeAccessIssue=false

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

import triton
import triton.language as tl

from peftkit_kernels.triton.activation import _gated
from peftkit_kernels.triton.together import compiled_together

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compute_capability_90: None
) -> Iterator[list[tuple[str, bool, str]]]:
    """Of each kernel that is compiled or loaded its name, whether it was on the disk, and the thread."""
    seen: list[tuple[str, bool, str]] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        seen.append((src.name, cache_hit, threading.current_thread().name))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for kernel in (_gated, _broken):
        kernel.device_caches.clear()
    yield seen
    for kernel in (_gated, _broken):
        kernel.device_caches.clear()


@triton.jit
def _broken(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "a block that nobody can have")
    tl.store(x, 0.0)


def launch(kernel: Callable[..., Any], width: int) -> Any:
    x_TO, y_TF = torch.zeros(3, 2 * width), torch.zeros(3, width)
    return kernel(x_TO, y_TF, 2 * width, WIDTH=width, BLOCK=32, GELU=False, DEPENDENT=False, num_warps=4)


def find(width: int) -> Any:
    """The kernel that such a launch finds, or compiles."""
    return launch(lambda *args, **kwargs: _gated.warmup(*args, grid=(3, 1), **kwargs), width)


def test_a_launch_only_begins_a_compilation_and_later_ones_find_it(compiled: list[tuple[str, bool, str]]) -> None:
    with compiled_together(2):
        for width in (32, 48, 32):
            launch(_gated[(3, 1)], width)
    assert [(name, on_disk) for name, on_disk, _ in compiled] == [("_gated", False)] * 2
    assert all(thread.startswith("peftkit-compile") for *_, thread in compiled)
    compiled.clear()
    found = [find(width) for width in (32, 48)]
    assert not compiled and len({kernel.hash for kernel in found}) == 2
    _gated.device_caches.clear()  # as in another process, which begins with what is on the disk
    again = [find(width) for width in (32, 48)]
    assert [(name, on_disk) for name, on_disk, _ in compiled] == [("_gated", True)] * 2
    assert [kernel.hash for kernel in again] == [kernel.hash for kernel in found]
    _gated.device_caches.clear()
    compiled.clear()
    with compiled_together(2):
        launch(_gated[(3, 1)], 64)
        launch(_gated[(3, 1)], 32)
    assert sorted((name, on_disk) for name, on_disk, _ in compiled) == [("_gated", False), ("_gated", True)]


def test_a_kernel_that_cannot_be_compiled_is_told_of_at_the_end_and_at_each_launch(
    compiled: list[tuple[str, bool, str]],
) -> None:
    with pytest.raises(triton.CompilationError, match="nobody can have"), compiled_together(1):
        _broken[(1,)](torch.zeros(1), BLOCK=8)
        launch(_gated[(3, 1)], 32)
    assert [name for name, *_ in compiled] == ["_gated"], "the others are compiled all the same"
    with pytest.raises(triton.CompilationError, match="nobody can have"):
        _broken[(1,)](torch.zeros(1), BLOCK=8)
    with compiled_together(1):  # the one before has ended
        launch(_gated[(3, 1)], 64)


def test_what_goes_wrong_between_launches_is_raised_and_nothing_stays_left_out(
    compiled: list[tuple[str, bool, str]],
) -> None:
    with pytest.raises(ZeroDivisionError), compiled_together(1):
        launch(_gated[(3, 1)], 32)
        raise ZeroDivisionError
    assert find(32).asm["cubin"]
    assert len(compiled) == 1
