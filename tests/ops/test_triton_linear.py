"""The product for few rows against float64: small in Triton's interpreter, at full size on a GPU."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peftkit_kernels import linear, reference

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

Near = Callable[..., None]
BOUND = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def module(interpreter: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernel takes the narrow inputs that it has time for here."""
    module = interpreter("linear")
    monkeypatch.setattr(module, "_NARROW", 0)
    return module


def check(run: Callable[..., Tensor], assert_near: Near, x: Tensor, weight: Tensor) -> None:
    bias = torch.randn(len(weight), device=x.device).to(x.dtype) * 9
    exact = x.double() @ weight.double().T
    y = run(x, weight)
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert_near(y, exact, BOUND[x.dtype])
    assert torch.equal(run(x, weight), y), "the same batch, the same bits"
    y = run(x, weight, bias)
    assert_near(y, exact + bias.double(), BOUND[x.dtype])
    assert torch.equal(run(x, weight, bias), y)


def drawn(rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    shapes = ((rows, in_features), (out_features, in_features))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [(1, 64, 32), (1, 72, 1096), (2, 8, 8), (3, 304, 136), (16, 40, 64), (17, 64, 256), (32, 104, 72)],
    ids=str,
)
def test_multiplies_ragged_sizes(
    seed: int, assert_near: Near, module: ModuleType, rows: int, out_features: int, in_features: int
) -> None:
    check(module.linear, assert_near, *drawn(rows, out_features, in_features, torch.float16))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("out_features", [16, 24, 40, 80])
@pytest.mark.parametrize("in_features", [64, 200])
def test_tiles_are_cut_or_shared_out(
    seed: int, assert_near: Near, module: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: int,
    out_features: int, in_features: int,
) -> None:  # fmt: skip
    config = module.Config(1 if rows == 1 else 16, 16, 32, 1, 2, 1)
    x, weight = drawn(rows, out_features, in_features, torch.float16)
    for multiprocessors in (2, 11):
        monkeypatch.setattr(module, "multiprocessors_of", lambda device, number=multiprocessors: number)
        with module.override(config):
            check(module.linear, assert_near, x, weight)
    module.counters_of.cache_clear()


def test_parts_are_counted_back_to_zero(seed: int, module: ModuleType) -> None:
    x, weight = drawn(2, 32, 1024, torch.float16)
    assert module._share_out(32, 1024, module._config(2), module.multiprocessors_of(x.device))[1] > 1
    module.linear(x, weight)
    assert not module.counters_of("linear", module._COUNTERS, x.device).any()


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_and_outputs_may_lie_anywhere(seed: int, module: ModuleType, rows: int) -> None:
    wide, tall = torch.randn(9, 100).half(), torch.randn(40, 96).half()
    weight = tall[3:19, 16:80]
    plain = module.linear(wide[:rows, :64].clone(), weight.clone())
    for x in (wide[:rows, :64], wide[: 2 * rows : 2, 8:72], wide.T.contiguous().T[:rows, 3:67], wide[:rows, 3:67]):
        assert torch.equal(module.linear(x, weight), module.linear(x.clone(), weight.clone()))
    assert torch.equal(module.linear(wide[:rows, :64], weight), plain)


def test_nothing_behind_the_rows_or_the_input_is_read(seed: int, module: ModuleType) -> None:
    x, weight = torch.full((24, 128), float("nan")).half(), torch.full((24, 128), float("nan")).half()
    x[:3, :72], weight[:, :72] = torch.randn(3, 72).half(), torch.randn(24, 72).half()
    assert module.linear(x[:3, :72], weight[:, :72]).isfinite().all()
    assert module.linear(x[:1, :72], weight[:, :72]).isfinite().all()


def test_no_rows_and_no_outputs(module: ModuleType) -> None:
    run = module.linear
    assert run(torch.ones(0, 64).half(), torch.ones(8, 64).half()).shape == (0, 8)
    assert run(torch.ones(2, 64).half(), torch.ones(0, 64).half()).shape == (2, 0)


def test_what_the_kernel_is_not_for_is_the_references(
    seed: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_linear", None)
    x, weight = drawn(65, 8, 64, torch.bfloat16)
    cases = [(x, weight), (x[:2].float(), weight.float()), (x[:2, :63], weight[:, :63]), (x[:2, 1:57], weight[:, 1:57])]
    cases += [(x[:2], weight[:7])]
    for rows, matrix in cases:
        assert torch.equal(module.linear(rows, matrix), F.linear(rows, matrix))
    for name, value in (("_NARROW", 64), ("capability_of", lambda device, interpreted: 80)):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert torch.equal(module.linear(x[:2], weight), F.linear(x[:2], weight))
    steady = module.linear(x[:2], weight, deterministic=True)
    assert torch.equal(steady, reference.linear(x[:2], weight, deterministic=True))


def test_up_to_64_rows_are_the_kernels(seed: int, assert_near: Near, module: ModuleType) -> None:
    x, weight = drawn(64, 64, 40, torch.float16)
    assert module._takes(x, weight) and not module._takes(torch.cat((x, x[:1])), weight)
    check(module.linear, assert_near, x, weight)


def test_the_reference_is_an_affine_map(seed: int, assert_near: Near) -> None:
    check(linear, assert_near, *drawn(5, 33, 40, torch.float32))
    with pytest.raises(ValueError, match="weight_OI has shape"):
        linear(torch.ones(2, 64), torch.ones(3, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_multiplies_on_a_gpu(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    for out_features, in_features in ((4096, 14336), (1 << 16, 1024), (1544, 1544), (8, 520), (100, 1024), (70, 96)):
        for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65):
            check(linear, assert_near, *drawn(rows, out_features, in_features, dtype, "cuda"))
