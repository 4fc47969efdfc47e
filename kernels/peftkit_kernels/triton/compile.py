"""Ahead-of-time compilation: what a kernel takes of a card, seen without one."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_WARP_SIZE = 32
_RESERVED = 1024  # bytes of the system's, which code for 9.0 and later counts where it declares memory itself


@dataclass(frozen=True)
class Specimen:
    """A kernel with the types and constants of one of its uses."""

    kernel: Any
    signature: Mapping[str, str]
    """Argument → "*bf16", "i32", "i64", "fp32" or "constexpr"; pointers are taken to be multiples of 16 bytes, as
    PyTorch's allocations are, and integers with ":16" behind them multiples of 16."""
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes of a card."""

    registers: int
    """Of a thread."""
    spills: int
    """Bytes of a thread's local memory: registers that found no room, and arrays indexed at run time."""
    shared_bytes: int
    """Of a program, as Triton allots it at the launch."""
    own_shared_bytes: int
    """Of a program beside that, declared in the kernel's assembly."""


def compile_for(specimen: Specimen, capability: int) -> Compiled:
    """Compiles a kernel for a compute capability (90 is 9.0) down to machine code; no GPU is needed."""
    compiled = translated(specimen, capability)
    usage = _resource_usage(compiled.asm["cubin"])
    own = max(0, usage["SHARED"] - (_RESERVED if capability >= 90 else 0))
    return Compiled(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared, own)


def translated(specimen: Specimen, capability: int) -> Any:
    """Triton's own result, with the kernel in each of its languages."""
    names = specimen.kernel.arg_names
    assert set(specimen.signature) == set(names), f"{specimen.kernel.__name__}: {set(specimen.signature) ^ set(names)}"
    types = {name: specimen.signature[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*" or ":" in kind
    }
    signature = {name: kind.removesuffix(":16") for name, kind in types.items()}
    source = ASTSource(specimen.kernel, signature, dict(specimen.constants), aligned)
    options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, _WARP_SIZE), options=options)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What the machine code says of itself: REG, STACK, LOCAL and more, of its one kernel."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(_CUOBJDUMP), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
