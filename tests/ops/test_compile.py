"""Every Triton kernel compiles ahead of time, without a GPU, and spills no registers; the run ends with the figures."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

from triton.runtime.jit import JITFunction

import peftkit_kernels.triton as package
from peftkit_kernels.triton.compile import compile_for

if TYPE_CHECKING:
    from peftkit_kernels.triton.compile import Specimen

CAPABILITIES = (80, 90, 100)
FULL = 90  # every specimen in bfloat16 there; elsewhere the first of each kernel, in float16 for the oldest
DTYPES = {80: "*fp16", 90: "*bf16", 100: "*bf16"}
MOST_REGISTERS = 255
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Most shared memory of a program: CUDA's programming guide, "Technical Specifications per Compute Capability"."""


@cache
def modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    found = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return [module for module in found if hasattr(module, "specimens")]


def specimens(capability: int) -> "Iterator[Specimen]":
    """The kernels with the configurations that a card of this capability takes."""
    for module in modules():
        by_capability = bool(inspect.signature(module.specimens).parameters)
        found = list(module.specimens(capability) if by_capability else module.specimens())
        chosen = [specimen for specimen in found if not other_dtype(specimen, capability)]
        first = {specimen.kernel.__name__: specimen for specimen in reversed(chosen)}
        yield from chosen if capability == FULL else first.values()


def other_dtype(specimen: "Specimen", capability: int) -> bool:
    types = set(specimen.signature.values()) & set(DTYPES.values())
    return bool(types) and DTYPES[capability] not in types


def cases() -> list[object]:
    return [
        pytest.param(specimen, capability, id=f"{specimen.kernel.__name__}-{capability}-{i}")
        for capability in CAPABILITIES
        for i, specimen in enumerate(specimens(capability))
    ]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("specimen", "capability"), cases())
def test_a_kernel_compiles_and_keeps_its_registers(
    specimen: "Specimen", capability: int, record_property: Callable[[str, object], None]
) -> None:
    compiled = compile_for(specimen, capability)
    figures = {
        "kernel": specimen.kernel.__name__,
        "capability": capability,
        "registers": compiled.registers,
        "spills": compiled.spills,
        "shared_bytes": compiled.shared_bytes,
        "own_shared_bytes": compiled.own_shared_bytes,
        "warps": specimen.num_warps,
        "stages": specimen.num_stages,
    }
    for name, value in figures.items():
        record_property(name, value)
    print(dict(specimen.constants), figures)
    assert compiled.spills == 0
    assert compiled.registers <= MOST_REGISTERS
    assert compiled.registers * specimen.num_warps * 32 <= 1 << 16
    total = compiled.shared_bytes + compiled.own_shared_bytes
    assert total <= SHARED_BYTES[capability]
    assert total <= 48 << 10 or compiled.shared_bytes > 48 << 10, "the launcher wouldn't ask for so much"


def test_every_kernel_is_compiled_or_part_of_one_that_is() -> None:
    kernels = {
        value
        for info in pkgutil.iter_modules(package.__path__)
        for value in vars(importlib.import_module(f"{package.__name__}.{info.name}")).values()
        if isinstance(value, JITFunction) and value.__module__.startswith(package.__name__)
    }
    assert kernels
    for kernel in kernels - {specimen.kernel for specimen in specimens(FULL)}:
        name = re.compile(rf"\b{kernel.__name__}\b")
        assert any(name.search(other.src) for other in kernels - {kernel}), f"{kernel} is never compiled"
