"""Launching again what Triton has compiled: the same kernel with the launch's own arguments, or Triton's own way."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from peftkit_kernels.triton.again import Again
from peftkit_kernels.triton.together import compiled_together


@triton.jit(do_not_specialize=["count"])
def _scale(x, y, count, factor, x_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * x_stride, mask=at < count, other=0.0)
    tl.store(y + at, (value * factor).to(y.dtype.element_ty), mask=at < count)


class Looked:
    """A kernel whose own launches are counted."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return self.kernel[grid]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of launches, which do nothing, on a card of compute capability 9.0 that isn't there."""
    from triton.runtime.driver import driver

    found: list[tuple[Any, ...]] = []

    class Utils:
        def load_binary(self, name: str, *_: object) -> tuple[Any, ...]:
            return None, name, 32, 0, 1024  # no module that would have to be unloaded

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448}

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            self._signature = tuple(src.signature.values()), repr(sorted(src.attrs.items()))

        def __call__(self, x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            found.append((self._signature, x, *rest[4:]))

    class Device:
        utils, launcher_cls = Utils(), Launcher

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(driver, "_active", Device())
    _scale.device_caches.clear()
    yield found
    _scale.device_caches.clear()


def launch(again: Again, x: Tensor, y: Tensor, *, count: int = 40, stride: int = 16, block: int = 64) -> None:
    again(-(-count // block), (x, y), (count, 2.5), (stride,), (block,), 1)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_launch_has_its_own_arguments_and_the_kernel_that_triton_would_take(launched: list[tuple[Any, ...]]) -> None:
    kernel = Looked(_scale)
    again = Again(kernel)
    x, y = torch.zeros(2, 1024)
    assert x.data_ptr() % 16 == y.data_ptr() % 16 == 0
    cases: list[dict[str, Any]] = [{}, {"count": 3}, {"stride": 1}, {"stride": 7}, {"block": 32}, {"count": 400}]
    for _ in range(3):
        for case in cases:
            launch(again, x, y, **case)
    assert kernel.count == 4  # count is none of what a kernel is compiled for
    assert launched[:6] == launched[6:12] == launched[12:]
    assert launched[1][1:] == (1, x, y, 3, 2.5, 16, 64) and launched[5][1] == 7
    assert len({entry[0] for entry in launched}) >= 3
    launch(again, x.half(), y)
    launch(again, x[1:], y)
    launch(again, x[1:], y)  # a pointer that isn't a multiple of 16 bytes has a kernel of its own
    assert kernel.count == 6
    assert launched[-1][0] == launched[-2][0] != launched[0][0]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_kernel_that_is_being_compiled_is_not_kept(launched: list[tuple[Any, ...]]) -> None:
    kernel = Looked(_scale)
    again = Again(kernel)
    x, y = torch.zeros(2, 1024)
    with compiled_together(1):
        launch(again, x, y)
        launch(again, x, y)
        assert not launched
    launch(again, x, y)
    launch(again, x, y)
    assert kernel.count == 3 and len(launched) == 2


@pytest.mark.gpu
def test_what_is_launched_again_computes(seed: int) -> None:
    again = Again(_scale)
    for count in (40, 1000, 17):
        for stride in (1, 3, 16):
            for dtype in (torch.float32, torch.bfloat16):
                for begin in (0, 1):
                    x, y = torch.randn(16001, device="cuda"), torch.empty(1001, dtype=dtype, device="cuda")
                    launch(again, x[begin:], y[begin:], count=count, stride=stride)
                    wanted = (x[begin::stride][:count] * 2.5).to(dtype)
                    assert torch.equal(y[begin : begin + count], wanted)
