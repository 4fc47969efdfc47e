"""NF4 dequantisation against bitsandbytes, bit for bit, and against the definition of its layout."""

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type, quantize_4bit
from torch import Tensor

from peftkit_kernels import nf4_dequantize


def quantised(weight: Tensor) -> tuple[Tensor, QuantState]:
    return quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")


def dequantised(codes: Tensor, state: QuantState, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    nested, offset = state.state2, state.offset
    assert nested is not None and offset is not None
    return nf4_dequantize(codes.flatten(), state.absmax, nested.code, nested.absmax, offset, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (300, 64), (33, 128), (520, 192)], ids=str)
def test_weights_equal_those_of_bitsandbytes_bit_for_bit(seed: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (torch.randn(shape) * torch.rand(shape[0], 1) * 3).to(dtype)
    codes, state = quantised(weight)
    ours = dequantised(codes, state, shape, dtype)
    assert ours.dtype == dtype and torch.equal(ours, dequantize_4bit(codes, state))


@pytest.mark.parametrize("shape", [(3, 48), (5, 3), (33, 130), (1, 1)], ids=str)
def test_blocks_run_on_over_the_ends_of_rows(seed: int, shape: tuple[int, int]) -> None:
    # bitsandbytes 0.50 on a CPU takes wrong scales here, where rows aren't whole blocks: so by the definition
    codes, state = quantised(torch.randn(shape))
    nested, offset, levels = state.state2, state.offset, get_4bit_type("nf4", device="cpu")
    assert nested is not None and offset is not None
    exact = torch.empty(shape).flatten()
    for element in range(exact.numel()):
        byte, block = codes.flatten()[element // 2].int(), element // 64
        scale = nested.code[state.absmax[block].int()] * nested.absmax[block // 256] + offset
        exact[element] = levels[byte & 15 if element % 2 else byte >> 4] * scale
    assert torch.equal(dequantised(codes, state, shape, torch.float32), exact.view(shape))


def test_quantisation_errs_by_nine_hundredths_of_a_normal_weight(seed: int) -> None:
    weight = torch.randn(256, 256)
    codes, state = quantised(weight)
    error = (dequantised(codes, state, (256, 256), torch.float32) - weight).norm() / weight.norm()
    assert 0.085 < error < 0.1
