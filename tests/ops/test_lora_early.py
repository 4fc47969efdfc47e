"""Grouped LoRA's shrink beside the product that y comes from: the same sums, and an end after both."""

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

from peftkit_kernels import grouped, grouped_lora, linear, rms_norm
from peftkit_kernels.segments import Segments
from peftkit_kernels.triton import lora, segmented
from peftkit_kernels.triton.compile import translated
from peftkit_kernels.triton.dependent import MAX_ROWS

WAIT = "griddepcontrol.wait"
RANK = 16


def early(name: str) -> list[str]:
    """PTX for 9.0 of the kernels of this name that run beside a product."""
    chosen = [one for one in lora.specimens(90) if one.kernel.__name__ == name and one.constants.get("EARLY")]
    assert chosen
    return [translated(one, 90).asm["ptx"] for one in chosen]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_no_program_of_an_early_shrink_leaves_before_the_product_has_ended() -> None:
    for ptx in early("_shrink"):
        ways_out = ptx.split("ret;")[:-1]
        assert ways_out and all(WAIT in way for way in ways_out)
        assert "st.global" in ptx and "st.global" not in ptx.rpartition(WAIT)[2]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_an_early_shrink_reads_x_past_l1() -> None:
    for ptx in early("_shrink"):
        assert "ld.global.cg" in ptx or "cp.async.cg" in ptx


@pytest.mark.parametrize("kind", segmented.BESIDE)
@pytest.mark.parametrize("rank", [8, 40])
def test_cuts_beside_a_product_make_the_same_update(
    seed: int,
    interpreter: Callable[[str], ModuleType],
    assert_near: Callable[..., None],
    kind: segmented.Kind,
    rank: int,
) -> None:
    module, out, features = interpreter("lora"), (48, 16), 96
    x, weight = torch.randn(5, features), torch.randn(2 * rank * (2 * features + sum(out)))
    arguments = call(x, weight, 2, out, rank)
    exact, y = torch.zeros(5, sum(out), dtype=torch.float64), torch.zeros(5, sum(out))
    grouped.grouped_lora(exact, x.double(), weight.double(), *arguments)
    with segmented.override(segmented.BESIDE[kind]):
        module.grouped_lora(y, x, weight, *arguments, x_settled=True)
    assert_near(y, exact, 1e-5)


def call(x: Tensor, weight: Tensor, adapters: int, out: tuple[int, ...], rank: int) -> tuple[Any, ...]:
    """What `grouped_lora` takes behind the weights: rows in turn, as evenly over the adapters as they come."""
    rows, features, device = x.shape[0], x.shape[1], x.device
    start = torch.tensor([rows * g // adapters for g in range(adapters + 1)], dtype=torch.int32, device=device)
    sizes = torch.tensor([[rank * (features + one)] * adapters for one in out])
    begin = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
    assert int(sizes.sum()) <= len(weight)
    ranks = torch.full(sizes.shape, rank, dtype=torch.int32, device=device)
    scales = torch.full(sizes.shape, 0.5, device=device)
    slots = torch.arange(adapters, dtype=torch.int32, device=device)
    offsets = begin.to(device), (begin + rank * features).to(device)
    order = torch.randperm(rows, device=device)
    row_slots = Segments.of(order, start, slots).row_slot_X
    return order, start, slots, row_slots, *offsets, ranks, scales, torch.full_like(offsets[0], -1), out


class Chain:
    """Layers of a norm, a product and its update, each with weights of its own."""

    def __init__(self, rows: int, adapters: int) -> None:
        def drawn(*shape: int) -> Tensor:
            return (torch.randn(shape, device="cuda") * 0.02).to(torch.bfloat16)

        self.x, out, size = drawn(rows, 2048), (1024, 512, 512), RANK * (3 * 2048 + 2048)
        self.layers = [
            (drawn(2048), drawn(2048, 2048), weight, call(self.x, weight, adapters, out, RANK))
            for weight in (drawn(adapters * size) for _ in range(6))
        ]

    def run(self, *, x_settled: bool) -> Tensor:
        h = self.x
        for norm, base, weight, arguments in self.layers:
            h = rms_norm(h, norm, 1e-5)[0]
            h = grouped_lora(linear(h, base), h, weight, *arguments, x_settled=x_settled)
        return h

    def graph(self, *, x_settled: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self.run(x_settled=x_settled)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = self.run(x_settled=x_settled)
        return graph, y


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "adapters"),
    [(1, 1), (4, 2), (8, 8), (16, 3), (32, 8), (32, 32), (32, 26), (50, 9), (64, 40), (64, 64), (65, 2)],
)
def test_a_graph_with_shrink_beside_the_product_has_the_bits_of_one_after_another(
    seed: int, rows: int, adapters: int
) -> None:
    chain, cuts = (
        Chain(rows, adapters),
        segmented.BESIDE.get(segmented.kind_of("lora", rows, adapters)),
    )
    graph, y = chain.graph(x_settled=True)
    with nullcontext() if cuts is None or rows > MAX_ROWS else segmented.override(cuts):
        one_by_one, wanted = chain.graph(x_settled=False)
    for _ in range(20):
        chain.x.copy_(torch.randn_like(chain.x))
        one_by_one.replay()
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, wanted)
        assert y.isfinite().all()
