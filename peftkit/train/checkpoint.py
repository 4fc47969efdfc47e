"""Checkpoints: everything a run needs to go on with the same bits, as tensors and JSON; nothing is ever unpickled.

    state/step-N/adapter.safetensors     the trainable parametrisation
                 optimizer.safetensors   its moments
                 state.json              step, position in the data, generators, recipe, hashes of base and data
                 best/                   the best adapter so far, where there is one
                 manifest.json           sha256 of the other files; written last

A checkpoint is written under a temporary name, synced and renamed; the last two are kept. A damaged one is passed
over, and said so.
"""

import hashlib
import json
import logging
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from peftkit.artifact import write_files
from peftkit.errors import InputError, RunError
from peftkit.train.optim import moments, set_moments

logger = logging.getLogger(__name__)

FORMAT = 3
KEPT = 2
ADAPTER, OPTIMIZER, STATE, MANIFEST = "adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_BEST = "best/"
_NAME = re.compile(r"step-(\d+)")
_FREE = {"out", "base", "data.train", "data.valid", "train.epochs", "train.max_steps", "train.save_every"}
"""Recipe fields that a resumed run may change: where files lie (their content is compared) and how far to go."""


@dataclass
class RunState:
    """How far a run has come; the one record that the loop changes."""

    step: int = 0
    """Optimiser steps done, skipped ones among them."""
    epoch: int = 0
    row: int = 0
    """Rows of a stream before the pool at hand."""
    taken: int = 0
    """Micro-batches taken of the epoch, or of a stream's pool."""
    tokens: int = 0
    """Tokens trained on, padding left out."""
    positions: int = 0
    """The same with padding."""
    target_tokens: int = 0
    seconds: float = 0.0
    """Time spent in steps, over all resumptions."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    """Of them, those since the last that was finite."""
    loss: float | None = None
    """Mean loss per target token of the last step that was not skipped."""
    evaluated: int = 0
    """Step of the last evaluation."""
    eval_loss: float | None = None
    """Its loss; None also where that was not finite."""
    best_step: int | None = None
    best_loss: float | None = None
    eval_score: float | None = None
    """Where eval.metric isn't loss, its value at the last evaluation, and at the best."""
    best_score: float | None = None
    worse: int = 0
    """Evaluations since the best."""
    stopped_early: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    state: RunState
    total_steps: int
    identity: dict[str, Any]
    """Recipe, base fingerprint and data hashes of the run that wrote it."""
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    generators: list[dict[str, Any]]
    """Generator states of each process."""
    best: dict[str, bytes]
    """The files of the best adapter's folder as it was then; none where none was best yet."""


def disk_bytes(num_trainable: int) -> int:
    """Most bytes of a run's checkpoints, with one that is being written, and its adapters: best, last and exported.
    Parameters and AdamW's two moments are float32."""
    return 4 * num_trainable * (3 * (KEPT + 1) + 3)


def save_checkpoint(
    folder: Path,
    *,
    state: RunState,
    total_steps: int,
    identity: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    generators: Sequence[Mapping[str, Any]],
    best: Path | None = None,
) -> Path:
    """Writes `folder`/step-N and removes all but the last two. `best` is the folder of the best adapter so far. Raises
    RunError when there is no room: the checkpoints before are then as they were."""
    content = {
        "format": FORMAT,
        "state": asdict(state),
        "total_steps": total_steps,
        "identity": identity,
        "generators": generators,
    }
    files = {
        ADAPTER: safetensors.torch.save(_on_cpu(parameters)),
        OPTIMIZER: safetensors.torch.save(_on_cpu(moments(optimizer, parameters))),
        STATE: json.dumps(content).encode(),
        **_files_in(best),
    }
    manifest = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    path = folder / f"step-{state.step}"
    write_files(path, {**files, MANIFEST: json.dumps(manifest, indent=2).encode()})
    older = sorted(step for step in _steps(folder) if step <= state.step)
    for step in _steps(folder) - set(older[-KEPT:]):
        shutil.rmtree(folder / f"step-{step}")
    return path


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The last whole checkpoint under `folder`, None where there is none at all.

    A damaged one is passed over with a warning. Raises RunError when all are damaged.
    """
    steps = sorted(_steps(folder), reverse=True)
    for step in steps:
        path = folder / f"step-{step}"
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            logger.warning("checkpoint %s is damaged (%s): passing it over", path, error)
    if steps:
        raise RunError(f"{folder}: no checkpoint is whole: start anew with --overwrite")
    return None


def check_same_run(checkpoint: Checkpoint, identity: Mapping[str, Any], total_steps: int) -> None:
    """Raises InputError naming the first field in which a run differs from the one that wrote `checkpoint`."""
    remedy = "put it back, or start anew with --overwrite"
    saved, now = _flat(checkpoint.identity["recipe"]), _flat(identity["recipe"])
    for field in sorted(saved.keys() | now.keys(), key=lambda field: (not field.endswith(".kind"), field)):
        if field in _FREE or field.startswith("log."):
            continue
        if saved.get(field) != now.get(field):
            raise InputError(
                f"--resume: {field} is {now.get(field)!r} but the run began with {saved.get(field)!r}: {remedy}",
                field=field,
            )
    for name, field in (("base", "base"), ("train", "data.train"), ("valid", "data.valid")):
        if checkpoint.identity[name] != identity[name]:
            shown = f" {now[field]}" if now.get(field) else ""
            raise InputError(f"--resume: {field}{shown} is not what the run began with: {remedy}", field=field)
    if identity["processes"] != checkpoint.identity["processes"]:
        raise InputError(
            f"--resume: the run began with {checkpoint.identity['processes']} processes, this are "
            f"{identity['processes']}: {remedy}"
        )
    if total_steps < checkpoint.total_steps:
        raise InputError(
            f"--resume: train.max_steps and train.epochs now give {total_steps} steps, the run began with "
            f"{checkpoint.total_steps}: they may only grow",
            field="train.max_steps",
        )


def restore(
    checkpoint: Checkpoint,
    *,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Puts a checkpoint's weights and moments back in place."""
    if set(checkpoint.adapter) != set(parameters):
        raise RunError(f"{checkpoint.path}: its adapter's tensors are not those of the recipe's method")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint.adapter[name])
    set_moments(optimizer, parameters, checkpoint.optimizer)


def put_back_best(checkpoint: Checkpoint, folder: Path) -> None:
    """Makes `folder` the best adapter's as it was at the checkpoint: a run that went on from there may have replaced
    it, or have been killed while it did."""
    shutil.rmtree(folder, ignore_errors=True)
    if checkpoint.best:
        write_files(folder, checkpoint.best)


def _files_in(best: Path | None) -> dict[str, bytes]:
    if best is None:
        return {}
    return {f"{_BEST}{path.relative_to(best)}": path.read_bytes() for path in sorted(best.rglob("*")) if path.is_file()}


def _steps(folder: Path) -> set[int]:
    if not folder.is_dir():
        return set()
    return {int(match.group(1)) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))}


def _read(path: Path) -> Checkpoint:
    manifest: dict[str, str] = json.loads((path / MANIFEST).read_bytes())
    contents: dict[str, bytes] = {}
    for name, sha256 in manifest.items():
        contents[name] = (path / name).read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != sha256:
            raise ValueError(f"{name} is not what was written")
    content = json.loads(contents[STATE])
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']} is not known")
    return Checkpoint(
        path=path,
        state=RunState(**content["state"]),
        total_steps=content["total_steps"],
        identity=content["identity"],
        adapter=safetensors.torch.load(contents[ADAPTER]),
        optimizer=safetensors.torch.load(contents[OPTIMIZER]),
        generators=content["generators"],
        best={name.removeprefix(_BEST): held for name, held in contents.items() if name.startswith(_BEST)},
    )


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def generator_states(device: torch.device) -> dict[str, Any]:
    """States of the generators of Python, NumPy, torch and, on a GPU, CUDA as JSON values."""
    kind, numpy_keys, *numpy_rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(numpy_keys).tolist(), *numpy_rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).tolist()
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Puts back what `generator_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8), device)


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
