"""A kernel that begins before the last one has ended touches no memory before its turn, but for constant weights in 4
bits, seen in its PTX for 9.0."""

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


def dependent(*names: str) -> "Iterator[Specimen]":
    for name in names:
        module = importlib.import_module(f"peftkit_kernels.triton.{name}")
        takes_capability = bool(inspect.signature(module.specimens).parameters)
        found = list(module.specimens(90) if takes_capability else module.specimens())
        chosen = [one for one in found if "DEPENDENT" in one.signature and "*fp16" not in one.signature.values()]
        assert chosen and all(one.constants["DEPENDENT"] for one in chosen)
        yield from chosen


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "specimen", [pytest.param(one, id=f"{one.kernel.__name__}-{i}") for i, one in enumerate(dependent(*MODULES))]
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


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "specimen", [pytest.param(one, id=f"{one.kernel.__name__}-{i}") for i, one in enumerate(dependent("nf4"))]
)
def test_a_product_in_4_bits_reads_nothing_but_its_weights_before_its_turn(specimen: "Specimen") -> None:
    ptx = translated(specimen, 90).asm["ptx"]
    before, wait, after = ptx.partition(WAIT)
    assert wait and MEMORY.search(after)
    assert WAIT not in after and ptx.count(LAUNCH) == 1
    assert not re.search(r"\b(st\.global|atom\.|red\.|ret;)", before)
    runtime = [name for name in specimen.kernel.arg_names if specimen.signature[name] != "constexpr"]
    touched = {runtime[number] for number in _parameters_behind_addresses(before)}
    assert touched <= {"code", "absmax", "absmax_code", "absmax_scale", "absmax_offset"}
    if specimen.kernel.__name__ in ("few_kernel", "wide_kernel"):
        assert {"code", "absmax"} <= touched


def _parameters_behind_addresses(ptx: str) -> set[int]:
    """Numbers of the parameters that addresses of loads from memory come from."""
    origins: dict[str, set[int]] = {}
    touched: set[int] = set()
    for statement in ptx.split(";"):
        if parameter := re.search(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)", statement):
            origins[parameter[1]] = {int(parameter[2])}
        elif MEMORY.search(statement):
            address = re.search(r"\[\s*([%\w]+)", statement)
            assert address
            touched |= origins.get(address[1], set())
        elif found := re.search(r"\b[a-z]\w*(?:\.\w+)+\s+(.*)", statement):
            result, *operands = re.findall(r"[%\w]+", found[1])
            origins[result] = set().union(*(origins.get(one, set()) for one in operands))
    return touched
