"""A whole run: claim the folder, prepare, resume, train, export, and say what came of it."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from peftkit.artifact import Artifact, base_record, read_adapter, save_adapter, write_adapter
from peftkit.artifact.reader import CONFIG_FILE
from peftkit.errors import InputError
from peftkit.recipe import Recipe
from peftkit.train.checkpoint import Checkpoint, latest_checkpoint
from peftkit.train.folder import BEST, LAST, RUN, STATE, MetricsLog, check, claim, write_json
from peftkit.train.loop import Bar, Trainer
from peftkit.train.memory import num_base, num_trainable
from peftkit.train.prepare import Prepared, prepare

logger = logging.getLogger(__name__)


class OpenBar(Protocol):
    """Opens a progress display over `total` steps."""

    def __call__(self, description: str, *, total: int | None = None, unit: str = "it") -> Bar: ...


@dataclass(frozen=True)
class RunSummary:
    """What came of a run."""

    out: Path
    """The adapter's folder, and the run's."""
    uid: str
    """Identity of the exported adapter."""
    exported: str
    """Which weights were exported: "best" or "last"."""
    steps: int
    total_steps: int
    skipped_steps: int
    """Steps left out because loss or gradient was not finite."""
    stopped_early: bool
    train_loss: float | None
    """Mean loss per target token of the last step."""
    eval_loss: float | None
    """Mean loss per target token of the last evaluation; None without data.valid."""
    best_loss: float | None
    best_step: int | None
    trainable_parameters: int
    base_parameters: int
    """Parameters of the base, each counted as one however few bits hold it."""
    tokens: int
    """Tokens trained on, padding left out."""
    target_tokens: int
    seconds: float
    """Time in optimiser steps."""
    tokens_per_s: float | None
    packed: bool
    """Rows were laid end to end."""
    padding: float
    """Share of the computed positions that was padding."""
    peak_memory_bytes: int
    """Most memory in use: of the GPU where there is one, else of the process since its start."""


def train(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: OpenBar | None = None
) -> RunSummary:
    """Trains by `recipe` into its `out` folder and exports the adapter there.

    `resume` goes on from the last whole checkpoint with the bits an uninterrupted run has; `overwrite` replaces a run
    that is there. `progress` opens a display, `peftkit.cli.output.progress` or one like it; None shows nothing. The
    process's random generators are seeded, and SIGINT is handled while it trains when called in the main thread.
    Raises InputError's family for bad input, RunError for what fails while running, Interrupted after Ctrl-C.
    """
    out = Path(recipe.out).expanduser()
    check(out, resume=resume, overwrite=overwrite)
    checkpoint = _checkpoint(out) if resume else None
    prepared = prepare(recipe)
    record = prepared.record()
    trainer = Trainer(prepared, out, record)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        logger.info("going on from step %d of %d", checkpoint.state.step, trainer.total_steps)
    claim(out, overwrite=overwrite)  # not before all else is known to be right
    facts = {**record, **base_record(prepared.model), "device": str(prepared.accelerator.device)}
    write_json(out / RUN, {"status": "unfinished", **facts})
    bar = _open(progress, trainer)
    try:
        state = trainer.state
        with MetricsLog(out, tensorboard=recipe.log.tensorboard, step=state.step, evaluated=state.evaluated) as log:
            trainer.run(log, bar)
    finally:
        bar.close()
    artifact = _export(prepared, trainer, out)
    summary = _summarise(prepared, trainer, artifact)
    write_json(out / RUN, {"status": "finished", **facts, "summary": {**asdict(summary), "out": str(out)}})
    return summary


def _checkpoint(out: Path) -> Checkpoint | None:
    """The checkpoint to resume from; None where a run was stopped before its first."""
    checkpoint = latest_checkpoint(out / STATE)
    if checkpoint is None:
        if (out / CONFIG_FILE).exists():
            raise InputError(
                f"--resume: {out} holds an adapter but no checkpoint: --overwrite trains anew", field="out"
            )
        logger.info("--resume: no checkpoint in %s yet: starting from the beginning", out / STATE)
    return checkpoint


class _NoBar:
    def update(self, n: int = 1, **figures: float) -> None:
        pass

    def close(self) -> None:
        pass


def _open(progress: OpenBar | None, trainer: Trainer) -> Bar:
    if progress is None:
        return _NoBar()
    start = trainer.state.step
    description = "train" if start == 0 else f"train from step {start}"
    return progress(description, total=trainer.total_steps - start, unit="step")


def _export(prepared: Prepared, trainer: Trainer, out: Path) -> Artifact:
    """Writes the adapter into `out`: the best by evaluation where there is one, else the last."""
    last: dict[str, Any] = trainer.adapter_record()
    if prepared.valid is not None:
        save_adapter(prepared.model, out / LAST, **last)
    if trainer.state.best_step is None:
        return save_adapter(prepared.model, out, **last)
    best = read_adapter(out / BEST)
    return write_adapter(out, best.config, best.tensors, _without_own(best.record))


def _without_own(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the fields that the writer fills in."""
    return {key: value for key, value in record.items() if key not in ("uid", "format")}


def _summarise(prepared: Prepared, trainer: Trainer, artifact: Artifact) -> RunSummary:
    state = trainer.state
    return RunSummary(
        out=artifact.path,
        uid=artifact.uid,
        exported="last" if state.best_step is None else "best",
        steps=state.step,
        total_steps=trainer.total_steps,
        skipped_steps=state.skipped,
        stopped_early=state.stopped_early,
        train_loss=state.loss,
        eval_loss=state.eval_loss,
        best_loss=state.best_loss,
        best_step=state.best_step,
        trainable_parameters=num_trainable(prepared.model),
        base_parameters=num_base(prepared.model),
        tokens=state.tokens,
        target_tokens=state.target_tokens,
        seconds=state.seconds,
        tokens_per_s=state.tokens / state.seconds if state.seconds else None,
        packed=prepared.packed,
        padding=1 - state.tokens / state.positions if state.positions else 0.0,
        peak_memory_bytes=peak_memory(prepared.accelerator.device),
    )


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: allocated on the GPU, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, where only a GPU's peak is known

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
