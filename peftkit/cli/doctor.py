"""`peftkit doctor`: what this machine can do, what would fail, and how to mend it."""

import importlib.util
import os
import platform
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import typer

from peftkit.cli import output

_MIN_MEMORY_BYTES = 3 << 30
"""What a small run on the embedded base and a server beside it want at least."""
_MIN_DISK_BYTES = 1 << 30
"""The converted embedded base in fp32 (0.54 GB), and what a run writes."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "note", "fail"]
    """"note": something works less well or not at all, but `peftkit demo` runs; "fail": it doesn't."""
    detail: str
    remedy: str | None = None


def command() -> None:
    """What this machine can do: GPU, 4-bit, dtypes, memory, versions; what would fail and how to mend it.

    Exits with 0 if `peftkit demo` would run, else with 1.
    """
    checks = _versions()
    if all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers", "gguf", "psutil")):
        checks += [_gpu(), _triton(), _bitsandbytes(), _cpu(), _memory(), _disk(), _base()]
    checks.append(_loopback())
    ready = all(check.state != "fail" for check in checks)
    result = {"ready": ready, "checks": checks, "versions": _all_versions()}
    output.emit(result, lambda: _text(checks, ready))
    raise typer.Exit(0 if ready else 1)


def _text(checks: list[Check], ready: bool) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state.ljust(4)}  {check.name.ljust(width)}  {check.detail}")
        if check.remedy:
            lines.append(f"{' ' * (width + 8)}→ {check.remedy}")
    lines.append("")
    lines.append("peftkit demo would run here" if ready else "peftkit demo would fail here: mend the lines marked fail")
    return "\n".join(lines)


def _all_versions() -> dict[str, str | None]:
    names = ["peftkit", *sorted(_requirements()), "triton", "peft"]
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _versions() -> list[Check]:
    """Python and every package peftkit declares, against the range it declares."""
    wrong = []
    for name, requirement in _requirements().items():
        found = _version(name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(Check(f"package {name}", "fail", found or "not installed", f'pip install "{requirement}"'))
    if wrong:
        return wrong
    shown = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "bitsandbytes", "accelerate"))
    return [Check("packages", "ok", f"python {platform.python_version()}, {shown}")]


def _requirements() -> dict[str, Any]:
    """Name → requirement of each package that peftkit needs without extras."""
    from packaging.requirements import Requirement

    found = [Requirement(text) for text in requires("peftkit") or []]
    return {item.name: item for item in found if item.marker is None or item.marker.evaluate({"extra": ""})}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        names = []
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            major, minor = torch.cuda.get_device_capability(i)
            bf16 = "bf16" if major >= 8 else "no bf16: fp32 is used"
            names.append(
                f"{torch.cuda.get_device_name(i)} (capability {major}.{minor}, {bf16}, "
                f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free)"
            )
        return Check("gpu", "ok", f"CUDA {torch.version.cuda}: {'; '.join(names)}")
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        fault = (
            "a CPU build" if torch.version.cuda is None else f"a CUDA {torch.version.cuda} build that finds no device"
        )
        return Check(
            "gpu", "note", f"there is a GPU, but torch {torch.__version__} is {fault}",
            "install a CUDA build of torch that fits the driver (pytorch.org, Get started)",
        )  # fmt: skip
    return Check("gpu", "note", "none: everything runs on the CPU, which is enough for bases of about 0.1 B parameters")


def _triton() -> Check:
    import torch

    found = _version("triton")
    if not torch.cuda.is_available():
        return Check("triton", "note", f"{found or 'not installed'}, not needed: on a CPU kernels are plain PyTorch")
    if found is None:
        return Check(
            "triton", "note", "not installed: kernels are plain PyTorch, and slow", 'pip install "peftkit[gpu]"'
        )
    return Check("triton", "ok", found)


def _bitsandbytes() -> Check:
    """Quantises a small matrix to NF4 and back where the work would be done."""
    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        return Check("4-bit (NF4)", "fail", "bitsandbytes isn't installed", "pip install bitsandbytes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        weight = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64)
        packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        error = (dequantize_4bit(packed, state).float() - weight).abs().max().item()
    except (ImportError, OSError, RuntimeError) as fault:
        first = next(iter(str(fault).splitlines()), type(fault).__name__)
        return Check("4-bit (NF4)", "fail", f"bitsandbytes fails on {device}: {first}", "pip install -U bitsandbytes")
    if error > 0.2:  # half of the widest gap between two codes is 0.152
        return Check(
            "4-bit (NF4)", "fail", f"bitsandbytes gives wrong numbers on {device}", "pip install -U bitsandbytes"
        )
    return Check("4-bit (NF4)", "ok", f"bitsandbytes {_version('bitsandbytes')} works on {device}")


def _cpu() -> Check:
    import torch

    flags = _cpu_flags()
    bf16 = "bf16 instructions" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "no bf16 instructions: fp32 is used"
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"{len(os.sched_getaffinity(0))} cores, {capability}, {bf16}, {torch.get_num_threads()} torch threads"
    return Check("cpu", "ok", detail)


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def _memory() -> Check:
    import psutil

    available = psutil.virtual_memory().available
    detail = f"{available / 2**30:.1f} GiB available"
    if available < _MIN_MEMORY_BYTES:
        remedy = f"close other programs: the demo needs about {_MIN_MEMORY_BYTES / 2**30:.0f} GiB"
        return Check("memory", "fail", detail, remedy)
    return Check("memory", "ok", detail)


def _disk() -> Check:
    from peftkit.base import cache_dir

    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free / 1e9:.1f} GB free"
    if not os.access(existing, os.W_OK):
        return Check("cache folder", "fail", f"{folder} can't be written", "set PEFTKIT_HOME to a folder of yours")
    if free < _MIN_DISK_BYTES:
        return Check("cache folder", "fail", detail, "make 1 GB free, or set PEFTKIT_HOME to a folder on another disk")
    return Check("cache folder", "ok", detail)


def _base() -> Check:
    from peftkit.base import EMBEDDED
    from peftkit.base.convert import is_whole

    base = next(iter(EMBEDDED.values()))
    if is_whole(base.directory):
        return Check("embedded base", "ok", f"{base.name}, converted")
    if base.gguf() is None:
        return Check("embedded base", "fail", f"{base.name} isn't installed", base.install)
    damaged = ", the old conversion is damaged" if base.directory.exists() else ""
    return Check("embedded base", "ok", f"{base.name}, converted at first use (half a minute){damaged}")


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return Check("loopback", "ok", "a server can listen on 127.0.0.1")
    except OSError as error:
        return Check("loopback", "fail", f"no server can listen on 127.0.0.1: {error}", "allow loopback sockets")
