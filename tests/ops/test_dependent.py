"""A kernel that begins before the last one has ended touches no memory before its turn, seen in its PTX for 9.0."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

from peftkit_kernels.triton.compile import translated

if TYPE_CHECKING:
    from peftkit_kernels.triton.compile import Specimen

MODULES = ("activation", "attention", "linear", "norm", "rope")
MEMORY = re.compile(r"\b(ld\.global|st\.global|atom\.|red\.|cp\.async\.c[ag]\.|cp\.async\.bulk\.(?!prefetch)|ret;)")
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def dependent() -> "Iterator[Specimen]":
    for name in MODULES:
        module = importlib.import_module(f"peftkit_kernels.triton.{name}")
        takes_capability = bool(inspect.signature(module.specimens).parameters)
        found = list(module.specimens(90) if takes_capability else module.specimens())
        chosen = [one for one in found if "DEPENDENT" in one.signature and "*fp16" not in one.signature.values()]
        assert chosen and all(one.constants["DEPENDENT"] for one in chosen)
        yield from chosen


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "specimen", [pytest.param(one, id=f"{one.kernel.__name__}-{i}") for i, one in enumerate(dependent())]
)
def test_memory_is_touched_after_the_wait_alone_and_no_program_leaves_before(specimen: "Specimen") -> None:
    ptx = translated(specimen, 90).asm["ptx"]
    before, wait, after = ptx.partition(WAIT)
    assert wait and MEMORY.search(after)
    assert not MEMORY.search(before)
    assert WAIT not in after, "once"
    assert ptx.count(LAUNCH) == 1


def test_a_product_sends_for_its_first_weights_before_its_turn() -> None:
    linear = importlib.import_module("peftkit_kernels.triton.linear")
    for specimen in linear.specimens(90):
        before = translated(specimen, 90).asm["ptx"].partition(WAIT)[0]
        assert before.count("cp.async.bulk.prefetch.L2.global") == 1
