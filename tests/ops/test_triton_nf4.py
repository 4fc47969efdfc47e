"""NF4 kernels against bitsandbytes and float64: small in Triton's interpreter, at full size on a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor

from peftkit_kernels import nf4_dequantize, nf4_linear, reference

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

Near = Callable[..., None]
Interpreter = Callable[[str], ModuleType]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes and nested scales, as bitsandbytes stores them."""
    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert state.state2 is not None and state.offset is not None
    return codes.flatten(), state.absmax, state.state2.code, state.state2.absmax, state.offset


def check_linear(
    module: ModuleType, assert_near: Near, rows: int, out_features: int, in_features: int, dtype: torch.dtype,
    device: str = "cpu", deterministic: bool = False,
) -> None:  # fmt: skip
    weight = torch.randn(out_features, in_features, device=device) * torch.rand(out_features, 1, device=device)
    parts = quantised(weight.to(dtype))
    x = torch.randn(rows, in_features, device=device).to(dtype)
    bias = torch.randn(out_features, device=device).to(dtype)
    held = reference.nf4_dequantize(*parts, (out_features, in_features), torch.float32).double()
    exact = x.double() @ held.T
    y = module.nf4_linear(x, *parts, out_features, deterministic=deterministic)
    assert y.dtype == dtype
    assert_near(y, exact, BOUND[dtype])
    assert torch.equal(module.nf4_linear(x, *parts, out_features, deterministic=deterministic), y)
    y = module.nf4_linear(x, *parts, out_features, bias, deterministic=deterministic)
    assert_near(y, exact + bias.double(), BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 128), (3, 48), (1, 1), (33, 130)], ids=str)
def test_dequantises_as_the_reference_bit_for_bit(
    seed: int, interpreter: Interpreter, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    parts = quantised((torch.randn(shape) * 3).to(dtype))
    ours = interpreter("nf4_dequantize").nf4_dequantize(*parts, shape, dtype)
    assert torch.equal(ours, reference.nf4_dequantize(*parts, shape, dtype))


def test_dequantises_as_bitsandbytes_over_many_nested_scales(seed: int, interpreter: Interpreter) -> None:
    weight = torch.randn(300, 64) * torch.rand(300, 1)
    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    ours = interpreter("nf4_dequantize").nf4_dequantize(*quantised(weight), (300, 64), torch.float32)
    assert torch.equal(ours, dequantize_4bit(codes, state))


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [(1, 70, 64), (3, 16, 576), (17, 5, 128), (2, 7, 96), (1, 20, 256), (33, 20, 320)],
    ids=str,
)
def test_multiplies_by_decoded_weights(
    seed: int, assert_near: Near, interpreter: Interpreter, rows: int, out_features: int, in_features: int
) -> None:
    module = interpreter("nf4")
    check_linear(module, assert_near, rows, out_features, in_features, torch.float32)


def test_many_parts_of_the_input_are_added_in_order(seed: int, assert_near: Near, interpreter: Interpreter) -> None:
    module = interpreter("nf4")
    assert module._splits(2, 1024 // 64, 132) > 1
    check_linear(module, assert_near, 5, 3, 1024, torch.float32, deterministic=True)


def test_a_deterministic_row_has_the_same_bits_in_any_company(seed: int, interpreter: Interpreter) -> None:
    module, parts, x = interpreter("nf4"), quantised(torch.randn(6, 128)), torch.randn(66, 128)
    together = module.nf4_linear(x, *parts, 6, deterministic=True)
    assert torch.equal(module.nf4_linear(x[65:], *parts, 6, deterministic=True), together[65:])
    assert torch.equal(module.nf4_linear(x[3:20], *parts, 6, deterministic=True), together[3:20])


CUTS = (
    {"rows": 4, "span": 2, "outs": 16, "num_warps": 1},
    {"rows": 8, "span": 1, "outs": 32, "num_warps": 2},
    {"rows": 8, "span": 0, "outs": 16, "num_warps": 2},
    {"rows": 4, "span": 2, "outs": 16, "num_warps": 4, "each": 2, "x_ahead": True},
    {"rows": 8, "span": 1, "outs": 16, "num_warps": 4, "deep": 2, "each": 2, "x_ahead": True},
    {"rows": 8, "span": 1, "outs": 16, "num_warps": 4, "deep": 4, "x_ahead": True, "shares": 0},
    {"rows": 16, "span": 0, "outs": 16, "num_warps": 2, "stages": 3},
    {"rows": 16, "span": 1, "outs": 64, "num_warps": 4},
)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(str(int(value)) for value in cut.values()))
def test_programs_that_share_tiles_of_outputs_and_of_rows(
    seed: int, assert_near: Near, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, cut: dict[str, int]
) -> None:
    module = interpreter("nf4")
    monkeypatch.setattr(module, "_MULTIPROCESSORS", {9: 5})
    with module.override(module.Few(**cut, per_sm=1)):
        check_linear(module, assert_near, cut["rows"] - 1, 70, 256, torch.float32)
        rows = cut["rows"] if cut.get("stages") else cut["rows"] + 1  # such a tile has all rows
        check_linear(module, assert_near, rows, 33, 320, torch.float16)
    assert not module.counters_of("nf4_linear", 1 << 14, torch.device("cpu")).any()


@pytest.mark.parametrize(
    ("rows", "cut"),
    [(3, None), (3, CUTS[3]), (7, CUTS[4]), (6, CUTS[2]), (14, CUTS[6]), (40, None)],
    ids=["few", "ahead", "deep", "wide", "scaled", "parts"],
)
def test_matrices_joined_below_one_another_keep_an_offset_each(
    seed: int,
    assert_near: Near,
    interpreter: Interpreter,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    cut: dict[str, int] | None,
) -> None:
    module, outs = interpreter("nf4"), (64, 128, 64)
    monkeypatch.setattr(module, "_MULTIPROCESSORS", {9: 5})
    parts = [quantised(torch.randn(out, 256) * 10**i) for i, out in enumerate(outs)]
    code_X, absmax_B, scale_G = (torch.cat([part[i] for part in parts]) for i in (0, 1, 3))
    offset_G = torch.cat([part[4].expand(len(part[3])) for part in parts])
    x = torch.randn(rows, 256)
    joined = (code_X, absmax_B, parts[0][2], scale_G, offset_G)
    exact = torch.cat(
        [
            x.double() @ reference.nf4_dequantize(*part, (out, 256), torch.float32).double().T
            for part, out in zip(parts, outs, strict=True)
        ],
        dim=1,
    )
    with module.override(module.Few(**cut, per_sm=1)) if cut else nullcontext():
        y = module.nf4_linear(x, *joined, sum(outs))
    for found, wanted in zip(y.split(outs, 1), exact.split(outs, 1), strict=True):
        assert_near(found, wanted, BOUND[torch.float32])
    weight = module.nf4_dequantize(*joined, (sum(outs), 256), torch.float32)
    assert torch.equal(weight, reference.nf4_dequantize(*joined, (sum(outs), 256), torch.float32))
    assert torch.equal(weight[64:192], reference.nf4_dequantize(*parts[1], (128, 256), torch.float32))


def test_programs_have_a_whole_tile_where_there_is_one_for_each_multiprocessor_and_share_them_elsewhere(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, cpu = interpreter("nf4"), torch.device("cpu")
    monkeypatch.setattr(module, "_MULTIPROCESSORS", {9: 10})
    config = module.Few(rows=4, span=2, outs=32, num_warps=4, per_sm=1, deep=4, shares=0)
    assert module._cut(config, 3, 32 * 9, 1024, cpu) == (1, 9, 9, 0)
    assert module._cut(config, 3, 32 * 11, 1024, cpu) == (1, 11, 10, 2)
    assert module._cut(config, 3, 32 * 4, 1024, cpu) == (1, 4, 8, 2)
    assert module._cut(config, 5, 32 * 4, 1024, cpu) == (2, 8, 10, 2)


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "wanted"),
    [
        (1, 28672, 4096, (4, 2, 4)),
        (4, 4096, 14336, (4, 2, 16)),
        (2, 4096, 4096, (4, 2, 16)),
        (3, 6144, 4096, (4, 2, 4)),
        (5, 4096, 4096, (8, 1, 4)),
        (8, 4096, 14336, (8, 2, 4)),
        (8, 4097, 4096, (8, 2, 4)),
        (9, 28672, 4096, (16, 1, 4)),
        (16, 4096, 14336, (16, 1, 4)),
        (16, 4096, 4096, None),
        (16, 28673, 4096, None),
        (30, 28672, 4096, (32, 0, 4)),
        (30, 4096, 14336, None),
    ],
    ids=str,
)
def test_a_product_takes_the_first_cut_that_suits(
    interpreter: Interpreter, rows: int, out_features: int, in_features: int, wanted: tuple[int, int, int] | None
) -> None:
    config = interpreter("nf4")._few(rows, out_features, in_features, torch.empty(rows, in_features, device="cpu"))
    assert (config and (config.rows, config.span, config.num_warps)) == wanted


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 30])
@pytest.mark.parametrize("size", [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1040, 2048)], ids=str)
def test_no_more_programs_share_a_tile_than_the_last_one_adds_up(
    interpreter: Interpreter, rows: int, size: tuple[int, int]
) -> None:
    module, device = interpreter("nf4"), torch.device("cpu")
    for config in module.FEW[min(most for most in module.FEW if most >= rows)]:
        _, tiles, programs, most = module._cut(config, rows, *size, device)
        depth = module._depth(config, size[1])
        begins = [number * tiles * depth // programs for number in range(programs + 1)]
        sharers = [0] * tiles
        for begin, end in pairwise(begins):
            for tile in range(begin // depth, -(-end // depth)):
                sharers[tile] += 1
        assert max(sharers) <= max(most, 1)


@pytest.mark.parametrize("size", [(16, 64), (5, 64), (7, 9)], ids=str)
def test_dequantises_codes_that_start_anywhere_in_memory(
    seed: int, interpreter: Interpreter, size: tuple[int, int]
) -> None:
    module, parts = interpreter("nf4_dequantize"), quantised(torch.randn(size))
    moved = torch.cat((parts[0][:1], parts[0]))[1:]
    assert moved.storage_offset() == 1
    with module.override(module.Config(words=32, num_warps=1)):
        ours = module.nf4_dequantize(moved, *parts[1:], size, torch.float32)
    assert torch.equal(ours, reference.nf4_dequantize(*parts, size, torch.float32))


@pytest.mark.parametrize("rows", [1, 7, 16, 40])
def test_multiplies_by_codes_that_start_anywhere_in_memory(
    seed: int, assert_near: Near, interpreter: Interpreter, rows: int
) -> None:
    module, (codes, *scales) = interpreter("nf4"), quantised(torch.randn(64, 256))
    x, exact = torch.randn(rows, 256), reference.nf4_dequantize(codes, *scales, (64, 256), torch.float32).double()
    for offset in (1, 2, 8):
        moved = torch.cat((codes[:offset], codes))[offset:]
        assert_near(module.nf4_linear(x, moved, *scales, 64), x.double() @ exact.T, BOUND[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 40])
def test_multiplies_by_codes_that_start_anywhere_in_memory_on_a_gpu(seed: int, assert_near: Near, rows: int) -> None:
    codes, *scales = quantised(torch.randn(4096, 4096, device="cuda").to(torch.bfloat16))
    x = torch.randn(rows, 4096, device="cuda").to(torch.bfloat16)
    exact = reference.nf4_dequantize(codes, *scales, (4096, 4096), torch.float32).double()
    for offset in (1, 2, 8):
        moved = torch.cat((codes[:offset], codes))[offset:]
        assert_near(nf4_linear(x, moved, *scales, 4096), x.double() @ exact.T, BOUND[torch.bfloat16])


def test_no_rows(interpreter: Interpreter) -> None:
    parts = quantised(torch.ones(3, 64))
    assert interpreter("nf4").nf4_linear(torch.ones(0, 64), *parts, 3).shape == (0, 3)


def test_the_reference_is_an_affine_map_by_the_dequantised_weight(seed: int, assert_near: Near) -> None:
    check_linear(reference, assert_near, 3, 7, 128, torch.float32, deterministic=True)
    with pytest.raises(ValueError, match="code_X has shape"):
        nf4_linear(torch.ones(2, 64), *quantised(torch.ones(3, 128)), 3)
    *scales, offset = quantised(torch.ones(3, 64))
    with pytest.raises(ValueError, match="absmax_offset has shape"):
        nf4_linear(torch.ones(2, 64), *scales, offset.expand(2), 3)
    assert nf4_linear(torch.ones(2, 64), *scales, offset.expand(1), 3).shape == (2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dequantises_as_bitsandbytes_on_a_gpu(seed: int, dtype: torch.dtype) -> None:
    for shape in ((4096, 14336), (1537, 8960), (5, 64), (33, 130)):
        weight = torch.randn(shape, device="cuda") * torch.rand(shape[0], 1, device="cuda")
        codes, state = quantize_4bit(weight.to(dtype), blocksize=64, compress_statistics=True, quant_type="nf4")
        assert state.state2 is not None and state.offset is not None
        parts = (codes.flatten(), state.absmax, state.state2.code, state.state2.absmax, state.offset)
        ours = nf4_dequantize(*parts, shape, dtype)
        assert torch.equal(ours, reference.nf4_dequantize(*parts, shape, dtype))
        if shape[1] % 64 == 0:
            assert torch.equal(ours, dequantize_4bit(codes, state))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_multiplies_on_a_gpu(seed: int, assert_near: Near, dtype: torch.dtype, deterministic: bool) -> None:
    from peftkit_kernels.triton import nf4

    shapes, counts = (
        ((4096, 14336), (28672, 4096), (1537, 1536), (100, 64), (70, 96)),
        (1, 2, 3, 4, 5, 9, 17, 33, 65, 200),
    )
    if dtype == torch.float32:  # products of full precision take long to compile
        shapes, counts = ((1537, 1536), (70, 96)), (1, 4, 5, 65)
    for out_features, in_features in shapes:
        for rows in counts:
            check_linear(nf4, assert_near, rows, out_features, in_features, dtype, "cuda", deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_scaled_before_the_product_on_a_gpu(seed: int, assert_near: Near, dtype: torch.dtype) -> None:
    from peftkit_kernels.triton import nf4

    for config in nf4._SCALED:
        for fewer, out_features, in_features in ((0, 28672, 4096), (3, 4096, 14336), (1, 1537, 1536)):
            with nf4.override(config):
                check_linear(nf4, assert_near, config.rows - fewer, out_features, in_features, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_deterministic_rows_on_a_gpu(seed: int, dtype: torch.dtype) -> None:
    parts = quantised(torch.randn(4096, 4096, device="cuda").to(dtype))
    x = torch.randn(200, 4096, device="cuda").to(dtype)
    together = nf4_linear(x, *parts, 4096, deterministic=True)
    for rows in (slice(0, 1), slice(150, 151), slice(7, 80)):
        assert torch.equal(nf4_linear(x[rows].clone(), *parts, 4096, deterministic=True), together[rows])
