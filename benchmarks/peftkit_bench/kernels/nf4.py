"""Cases of NF4, beside bitsandbytes and cuBLAS in bfloat16."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import peftkit_kernels as ops
from peftkit_bench.kernels.case import Case, Floor, Goal, NotInstalled, Work, num_sets, share_of_floor
from peftkit_bench.timing import Call

_SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (17920, 1536))
"""Out and in features: 8B's gate and up, down, q k v, o; 1.5B's gate and up."""
_FEW = (1, 4, 16, 32, 64)
_MANY = (128, 256, 512)
_QUICK = (28672, 4096)
_BITS = 4.127
"""Of a weight: its code, and its share of the scales in 8 bits and of theirs in float32."""

Quantised = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def cases() -> Iterator[Case]:
    """The linear for few rows, for many, and dequantising."""
    for out, in_features in _SHAPES:
        weight_bytes = out * in_features * _BITS / 8
        for rows in _FEW if out > 6144 or in_features > 4096 else (1, 16, 64):
            floor = Floor(weight_bytes + 2 * rows * (out + in_features), 2 * rows * out * in_features)
            beats = ("bitsandbytes", "cublas_bf16") if rows <= 32 else ("bitsandbytes",)
            goal = (
                share_of_floor(floor, 0.65, *beats)
                if rows == 1
                else Goal(f"ahead of {' and '.join(beats)}", beats=beats)
            )
            yield _linear("nf4_linear", rows, out, in_features, floor, goal)
        for rows in _MANY if (out, in_features) in _SHAPES[:2] else ():
            floor = Floor(weight_bytes + 2 * rows * (out + in_features), 2 * rows * out * in_features)
            goal = Goal("ahead of bitsandbytes", beats=("bitsandbytes",))
            yield _linear("nf4_linear many", rows, out, in_features, floor, goal)
    for out, in_features in _SHAPES[:2]:
        floor = Floor(out * in_features * (_BITS / 8 + 2))
        prepare = partial(_prepare_dequantize, out, in_features)
        sizes = {"out": out, "in": in_features}
        quick = (out, in_features) == _QUICK
        yield Case(
            "nf4_dequantize", sizes, floor, share_of_floor(floor, 0.85), prepare, ("nf4_dequantize", None), quick
        )


def _linear(kernel: str, rows: int, out: int, in_features: int, floor: Floor, goal: Goal) -> Case:
    sizes = {"rows": rows, "out": out, "in": in_features}
    prepare = partial(_prepare_linear, rows, out, in_features)
    tuned = ("nf4", str(rows)) if rows <= 64 else None
    quick = (out, in_features) == _QUICK and rows in (1, 4, 32, 256)
    return Case(kernel, sizes, floor, goal, prepare, tuned, quick)


def _quantised(out: int, in_features: int) -> Quantised:
    """Random codes and scales in bitsandbytes' layout."""
    num_blocks = out * in_features // 64
    code = torch.randint(0, 256, (out * in_features // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.randint(0, 256, (num_blocks,), dtype=torch.uint8, device="cuda")
    absmax_code = torch.linspace(-1, 1, 256, device="cuda")
    absmax_scale = torch.rand(-(-num_blocks // 256), device="cuda") * 0.01
    return code, absmax, absmax_code, absmax_scale, torch.tensor(0.02, device="cuda")


def _prepare_linear(rows: int, out: int, in_features: int) -> Work:
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    sets = num_sets(out * in_features / 2)
    ours = [partial(ops.nf4_linear, x, *_quantised(out, in_features), out) for _ in range(sets)]
    peers = {
        "bitsandbytes": partial(_bitsandbytes, x, out, in_features, sets),
        "cublas_bf16": partial(_cublas, x, out, in_features, num_sets(2 * out * in_features)),
    }
    return Work(ours, peers)


def _prepare_dequantize(out: int, in_features: int) -> Work:
    sets = num_sets(out * in_features / 2)
    shape = (out, in_features)
    ours = [partial(ops.nf4_dequantize, *_quantised(*shape), shape, torch.bfloat16) for _ in range(sets)]
    return Work(ours, {"bitsandbytes": partial(_bitsandbytes, None, out, in_features, sets)})


def _bitsandbytes(x: Tensor | None, out: int, in_features: int, sets: int) -> Sequence[Call]:
    """Its product with x, or dequantising alone."""
    try:
        import bitsandbytes
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError as error:
        raise NotInstalled(f"bitsandbytes ({error})") from None
    calls: list[Call] = []
    for _ in range(sets):
        weight = torch.randn(out, in_features, device="cuda", dtype=torch.bfloat16) * 0.02
        packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        if x is None:
            calls.append(partial(dequantize_4bit, packed, state))
        else:
            calls.append(partial(bitsandbytes.matmul_4bit, x, packed.t(), quant_state=state))
    return calls


def _cublas(x: Tensor, out: int, in_features: int, sets: int) -> Sequence[Call]:
    weights = [torch.randn(out, in_features, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    return [partial(F.linear, x, weight) for weight in weights]
