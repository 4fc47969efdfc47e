"""A bottleneck that begins while the kernel before it runs: nothing is touched too soon, and the sums are the same."""

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

from peftkit_kernels import grouped_bottleneck, rms_norm
from peftkit_kernels.triton import bottleneck
from peftkit_kernels.triton.compile import translated

WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
MEMORY = re.compile(r"\b(ld\.global|st\.global|atom\.|red\.|cp\.async|ret;)")


def early(*names: str) -> list[str]:
    """PTX for 9.0 of the kernels of these names that begin early."""
    chosen = [one for one in bottleneck.specimens(90) if one.kernel.__name__ in names and one.constants["EARLY"]]
    assert {one.kernel.__name__ for one in chosen} == set(names)
    return [translated(one, 90).asm["ptx"] for one in chosen]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_first_launch_touches_memory_after_its_turn_alone() -> None:
    for ptx in early("_down", "_down_rows"):
        before, wait, after = ptx.partition(WAIT)
        assert wait and not MEMORY.search(before) and MEMORY.search(after)
        assert LAUNCH not in before and after.count(LAUNCH) == 1, "the second reads y early"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_no_program_of_the_second_launch_leaves_or_writes_before_the_first_has_ended() -> None:
    for ptx in early("_up"):
        too_soon = [line for line in before_waits(ptx) if "ret;" in line or "st.global" in line]
        assert WAIT in ptx and "st.global" in ptx and not too_soon
        assert "ld.global.cg" in ptx, "y past L1"


def before_waits(ptx: str) -> list[str]:
    """Lines that a thread can come to without waiting, whichever way it takes."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.partition(":")[0]: n for n, line in enumerate(lines) if line.startswith("$L")}
    seen: set[int] = set()
    ways = [labels["$L__func_begin0"]]
    while ways:
        n = ways.pop()
        while n < len(lines) and n not in seen and WAIT not in lines[n]:
            seen.add(n)
            if jump := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", lines[n]):
                ways.append(labels[jump[1]])
            if (jump or "ret;" in lines[n]) and not lines[n].startswith("@"):
                break
            n += 1
    return [lines[n] for n in sorted(seen)]


class Chain:
    """Layers of a norm and a bottleneck, each with weights of its own."""

    def __init__(self, rows: int, adapters: int, hidden: int = 2048, width: int = 64) -> None:
        def drawn(*shape: int) -> Tensor:
            return (torch.randn(shape, device="cuda") * 0.02).to(torch.bfloat16)

        size = 2 * width * hidden + hidden + width
        self.x, self.layers = drawn(rows, hidden), [(drawn(hidden), drawn(adapters * size)) for _ in range(6)]
        starts = [rows * g // adapters for g in range(adapters + 1)]
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.segments = (
            torch.randperm(rows, device="cuda"),
            torch.tensor(starts, **ints),
            torch.arange(adapters, **ints),
            torch.arange(adapters, **ints).repeat_interleave(torch.tensor(starts, **ints).diff()),
        )
        self.tables = (
            torch.arange(adapters, device="cuda") * size,
            torch.full((adapters,), width, **ints),
            torch.full((adapters,), 0.5, device="cuda"),
            torch.tensor([[1, 3, 0]] * adapters, **ints),
        )

    def run(self, *, in_turn: bool) -> Tensor:
        h = self.x
        for norm, weights in self.layers:
            h, stream = rms_norm(h, norm, 1e-5, h)
            if in_turn:
                torch.cuda.synchronize()
            h = grouped_bottleneck(h, stream, weights, *self.segments, *self.tables)
            if in_turn:
                torch.cuda.synchronize()
        return h


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "adapters"), [(1, 1), (4, 2), (8, 8), (16, 3), (32, 32), (64, 64), (65, 65)])
def test_a_graph_of_early_launches_has_the_bits_of_one_after_another(
    seed: int, monkeypatch: pytest.MonkeyPatch, rows: int, adapters: int
) -> None:
    chain = Chain(rows, adapters)
    chain.run(in_turn=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain.run(in_turn=False)
    for _ in range(10):
        chain.x.copy_(torch.randn_like(chain.x))
        with monkeypatch.context() as plain:
            plain.setattr(bottleneck, "begins_early", lambda *_: False)
            wanted = chain.run(in_turn=True)
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert torch.equal(y, wanted)
        assert y.isfinite().all()
