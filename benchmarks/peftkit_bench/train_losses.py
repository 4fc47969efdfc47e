"""Twenty steps of a small base beside the same on the reference path, each in a process of its own.

The reference path is the modules' own forwards on plain PyTorch, with masked attention and nothing computed twice.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from peftkit.base import BaseInfo, Quant
from peftkit.methods import attention, detach, unfuse
from peftkit.train.loop import Trainer
from peftkit.train.prepare import Resident, Rows, adapt
from peftkit_bench.train import METHODS, Case, Settings, random_data, recipe
from peftkit_bench.train_model import random_base

STEPS = 20
_LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Largest difference of a loss from the reference's, by the dtype of the arithmetic."""
_CASES: tuple[tuple[Quant, str], ...] = tuple((quant, method) for quant in ("nf4", "none") for method in METHODS)


def compare(settings: Settings, shape: str = "small", rows: int = 2, length: int = 512) -> Iterator[dict[str, Any]]:
    """A line for each way of holding the base and each method: the largest difference of the 20 losses."""
    job = {"shape": shape, "rows": rows, "length": length, "device": str(settings.device), "seed": settings.seed}
    dtypes = ("bfloat16", "float32") if settings.device.type == "cuda" else ("float32",)
    runs = list(product(dtypes, ("auto", "reference")))
    with ThreadPoolExecutor(len(runs)) as threads:  # bound by their Python, each in a process of its own
        found = threads.map(lambda run: _child({**job, "dtype": run[0], "kernels": run[1]}), runs)
        losses_of = dict(zip(runs, found, strict=True))
    for name in dtypes:
        ours, reference = losses_of[name, "auto"], losses_of[name, "reference"]
        limit = _LIMITS[getattr(torch, name)]
        for case, losses in ours.items():
            pairs = list(zip(losses, reference[case], strict=True))
            largest = max((abs(a - b) for a, b in pairs), default=math.nan)
            yield {
                "case": "losses",
                "name": f"{shape} {case} {rows}x{length} {name}",
                "steps": len(pairs),
                "first": pairs[0],
                "last": pairs[-1],
                "largest_difference": largest,
                "limit": limit,
                "met": largest <= limit,
            }


def _child(job: dict[str, Any]) -> dict[str, list[float]]:
    environment = {**os.environ, "PEFTKIT_KERNELS": job["kernels"]}
    argv = [sys.executable, "-m", "peftkit_bench.train_losses", json.dumps(job)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"20 steps with PEFTKIT_KERNELS={job['kernels']}: {done.stderr[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def losses(job: dict[str, Any]) -> dict[str, list[float]]:
    """Case → its losses, in this process."""
    device, dtype = torch.device(job["device"]), getattr(torch, job["dtype"])
    settings, is_reference = Settings(device, seed=job["seed"]), job["kernels"] == "reference"
    if is_reference:
        attention.DEVICES = frozenset()
    found: dict[str, list[float]] = {}
    accelerator = Accelerator(cpu=device.type == "cpu")
    tokenizer: Any = None  # no text is read or written
    for quant, method in _CASES:
        case = Case(
            job["shape"],
            quant,
            method,
            job["rows"],
            job["length"],
            level="none" if is_reference else "full",
            packed=True,
        )
        model = random_base(case.shape, quant, dtype, device, seed=settings.seed)
        resident = Resident(accelerator, BaseInfo(case.shape, Path(case.shape)), model, tokenizer)
        data = random_data(case, int(model.config.vocab_size), settings.seed)
        trainer = Trainer(adapt(resident, recipe(case, settings), Rows(data, None, [], [])), Path(case.shape), {})
        if is_reference:
            unfuse(model)
        found[f"{quant} {method}"] = [_loss(trainer) for _ in range(STEPS)]
        detach(model)
    return found


def _loss(trainer: Trainer) -> float:
    trainer._step()
    assert trainer.state.loss is not None
    return trainer.state.loss


if __name__ == "__main__":
    print(json.dumps(losses(json.loads(sys.argv[1]))))
