"""The operations inside torch.compile's graphs, against eager calls, and as torch's own checks of custom operations
see them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import peftkit_kernels as ops

INT = torch.int32
NO_AUTOGRAD = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def ints(*values: int, dtype: torch.dtype = INT) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@dataclass(frozen=True)
class Layer:
    """Three tokens of two requests before a layer of 2 query heads and 1 KV head of size 4, hidden 8."""

    token: Tensor
    table: Tensor
    norm: Tensor
    qkv: Tensor
    cos: Tensor
    sin: Tensor
    kv: Tensor
    weights: Tensor
    code: Tensor
    gate_up: Tensor

    @classmethod
    def random(cls) -> "Layer":
        cos, sin = torch.rand(3, 2), torch.rand(3, 2)
        code = torch.randint(0, 256, (32,), dtype=torch.uint8)
        kv, weights = torch.randn(4, 16, 2, 1, 4), torch.randn(200)
        token, table = torch.randint(0, 6, (3,)), torch.randn(6, 8)
        return cls(token, table, torch.randn(8), torch.randn(16, 8), cos, sin, kv, weights, code, torch.randn(16, 8))

    def fresh(self) -> "Layer":
        return replace(self, kv=self.kv.clone())

    @property
    def segments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ints(0, 2, dtype=torch.int64), ints(0, 2), ints(1), ints(1, 1)

    @property
    def nested(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ints(7, dtype=torch.uint8), torch.linspace(-1, 1, 256), torch.tensor([0.5]), torch.tensor(0.25)


def step(layer: Layer) -> tuple[Tensor, Tensor]:
    """All operations, one after another; what they leave in the pages too."""
    x, _ = ops.rms_norm(ops.embedding(layer.token, layer.table), layer.norm, 1e-5)
    qkv = ops.linear(x, layer.qkv)
    table = torch.tensor([[0, 64]])
    lora = (*layer.segments, table, table + 32, ints(2, 2)[None], torch.ones(1, 2), torch.full((1, 2), -1))
    qkv = ops.grouped_lora(qkv, x, layer.weights, *lora, out_features=(16,))
    q = ops.rope_write_kv(qkv.view(3, 4, 4), layer.cos, layer.sin, ints(1, 2, 20, dtype=torch.int64), layer.kv)
    pages = ops.copy_pages(layer.kv, ints(1, dtype=torch.int64), ints(3, dtype=torch.int64))
    paged = (ints(0, 2)[:, None], ints(0, 2, 3), ints(3, 5), ints(0, 0))
    y = ops.paged_attention(
        q, ops.copy_pages(pages, ints(3, dtype=torch.int64), ints(2, dtype=torch.int64)), *paged, scale=0.5
    )
    form = ints(0, 0, 0, 1, 3, 0).view(2, 3)
    y, x = y.reshape(3, 8) + 1, x + 1
    y = ops.grouped_bottleneck(
        y, x, layer.weights, *layer.segments, ints(0, 50, dtype=torch.int64), ints(2, 3), torch.ones(2), form
    )
    y, x = ops.rms_norm(y, layer.norm, 1e-5, x)
    gate_up = ops.linear(y, layer.gate_up)
    y = ops.silu_and_mul(gate_up) + ops.gelu_tanh_and_mul(gate_up)
    y = y + ops.nf4_linear(y, layer.code, *layer.nested, out_features=8)
    return y @ ops.nf4_dequantize(layer.code, *layer.nested, (8, 8), y.dtype), x


def test_a_compiled_graph_holds_every_operation_and_gives_the_same_result(seed: int) -> None:
    layer = Layer.random()
    eager, compiled = layer.fresh(), layer.fresh()
    expected = step(eager)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    for out, ref in zip((*got, compiled.kv), (*expected, eager.kv), strict=True):
        assert torch.equal(out, ref)
    assert not torch.equal(compiled.kv, layer.kv)


def test_a_compiled_draw_is_the_eager_one(seed: int) -> None:
    logits, rows = torch.randn(4, 50), torch.arange(4)
    parameters = (
        torch.ones(4),
        ints(0, 3, 0, 0),
        torch.tensor([1, 1, 0.5, 1]),
        torch.tensor([0, 0, 0, 0.1]),
        rows,
        rows,
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda logits: ops.sample(logits * 2, *parameters), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits), ops.sample(logits * 2, *parameters))


def test_another_number_of_rows_is_the_same_graph(seed: int) -> None:
    weight, norm = torch.randn(6, 8), torch.randn(8)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def block(x: Tensor) -> Tensor:
        return ops.silu_and_mul(ops.linear(ops.rms_norm(x, norm, 1e-5)[0], weight))

    for rows in (5, 7, 30):
        x = torch.randn(rows, 8)
        assert torch.equal(block(x), ops.silu_and_mul(ops.linear(ops.rms_norm(x, norm, 1e-5)[0], weight)))
    assert counter.frame_count == 1


def test_a_wrong_argument_is_refused_by_name_when_a_graph_is_made() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: ops.linear(x, w), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"weight_OI has shape \[3, 4\]: \(any, 5\) is wanted"):
        compiled(torch.zeros(2, 5), torch.zeros(3, 4))


def lora_arguments() -> tuple[Any, ...]:
    table = torch.tensor([[0, 64]])
    layer = Layer.random()
    tables = (table, table + 32, ints(2, 2)[None], torch.ones(1, 2), torch.full((1, 2), -1))
    return torch.randn(3, 16), torch.randn(3, 8), layer.weights, *layer.segments, *tables, [16]


def bottleneck_arguments() -> tuple[Any, ...]:
    layer = Layer.random()
    tables = (ints(0, 50, dtype=torch.int64), ints(2, 3), torch.ones(2), ints(0, 0, 0, 1, 3, 0).view(2, 3))
    return torch.randn(3, 8), torch.randn(3, 8), layer.weights, *layer.segments, *tables


def rope_arguments() -> tuple[Any, ...]:
    cells = ints(1, 2, 20, dtype=torch.int64)
    return torch.randn(3, 4, 4), torch.rand(3, 2), torch.rand(3, 2), cells, torch.randn(4, 16, 2, 1, 4)


def joined_arguments() -> tuple[Any, ...]:
    codes = [torch.randint(0, 256, (rows * 32,), dtype=torch.uint8) for rows in (64, 128)]
    absmaxes = [torch.randint(0, 256, (rows,), dtype=torch.uint8) for rows in (64, 128)]
    tables, scales, offsets = [[torch.rand(size) for _ in (64, 128)] for size in (256, 1, ())]
    return codes, absmaxes, tables, scales, offsets, [64, 128], 64, torch.float32


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embedding": lambda: (torch.tensor([1, 0]), torch.randn(3, 4)),
    "linear": lambda: (torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)),
    "rms_norm": lambda: (torch.randn(3, 4), torch.randn(4), 1e-5, torch.randn(3, 4)),
    "rope_write_kv": rope_arguments,
    "silu_and_mul": lambda: (torch.randn(3, 8),),
    "gelu_tanh_and_mul": lambda: (torch.randn(3, 8),),
    "grouped_lora": lora_arguments,
    "grouped_bottleneck": bottleneck_arguments,
    "copy_pages": lambda: (torch.randn(4, 16, 2, 1, 4), torch.tensor([0, 1]), torch.tensor([3, 2])),
    "nf4_dequantize": lambda: (Layer.random().code, *Layer.random().nested, [8, 8], torch.float32),
    "nf4_dequantize_joined": joined_arguments,
    "add_rms_norm_forward": lambda: (torch.randn(3, 4), torch.randn(3, 4), torch.randn(4), 1e-5),
    "rms_norm_backward": lambda: (*torch.randn(2, 3, 4), torch.randn(4), torch.rand(3), torch.randn(3, 4)),
    "rotate_": lambda: (torch.randn(3, 4, 2), torch.randn(3, 1, 2), *torch.randn(2, 3, 2)),
    "rotate_back": lambda: (torch.randn(3, 4, 2), *torch.randn(2, 3, 1, 2), *torch.randn(2, 3, 2)),
    "gated_backward_": lambda: (*torch.randn(3, 4, 6), "silu"),
    "nf4_linear": lambda: (torch.randn(3, 8), Layer.random().code, *Layer.random().nested, 8, torch.randn(8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_declared_of_an_operation_is_true(name: str, seed: int) -> None:
    operation = getattr(torch.ops.peftkit, name).default
    torch.library.opcheck(operation, CALLS[name](), test_utils=NO_AUTOGRAD)


def test_every_public_operation_is_one_of_torchs() -> None:
    joined = {"rotate_joined_grad", "gated_joined_grad", "rms_norm_beside_grad", "add_rms_norm_grad"}
    with_gradients = {"rms_norm_grad", "rotate_grad", "gated_grad", *joined}  # their steps are torch's
    helpers = with_gradients | {
        "compiled_together",
        "pack_linear",
        "sort_by_slot",
        "Segments",
        "BOTTLENECK_INPUTS",
        "NON_LINEARITIES",
        "MAX_RANK",
        "max_width",
    }
    assert set(ops.__all__) - helpers == {name for name in ops.__all__ if hasattr(torch.ops.peftkit, name)}
