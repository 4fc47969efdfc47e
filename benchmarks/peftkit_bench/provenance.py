"""What every line of a benchmark says of where it comes from: hardware, versions, commit."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from peftkit_bench.timing import card


def hardware(device: str = "auto") -> dict[str, Any]:
    """The card, where one is used, and the processor: its model, cores and load before the run."""
    gpu = card() if device != "cpu" and torch.cuda.is_available() else {}
    return gpu | {"cpu": _processor(), "cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Python's and CUDA's version and those of packages; None for one that isn't installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The checkout's commit; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
