"""A whole run: claim the folder, prepare, resume, train, export, and say what came of it."""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from peftkit.artifact import Artifact, base_record, read_adapter, save_adapter, write_parts
from peftkit.artifact.reader import CONFIG_FILE, RECORD_FILE
from peftkit.base.divided import unequal_passes
from peftkit.errors import InputError, PeftkitError
from peftkit.methods import detach, fast_share
from peftkit.recipe import Recipe, Runs
from peftkit.train.checkpoint import Checkpoint, disk_bytes, latest_checkpoint, put_back_best
from peftkit.train.fit import check_fits
from peftkit.train.folder import (
    BEST,
    LAST,
    REPORT,
    RUN,
    STATE,
    MetricsLog,
    alone,
    check,
    check_room,
    check_wandb,
    check_writable,
    claim,
    machine,
    without_own,
    write_json,
)
from peftkit.train.generate import generate_answers
from peftkit.train.loop import Bar, Trainer
from peftkit.train.memory import num_base, num_trainable, peak_memory
from peftkit.train.prepare import Prepared, adapt, load
from peftkit.train.processes import gather
from peftkit.train.report import write_report

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 48
"""Most tokens of an answer that is recorded before and after training."""


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
    """Mean loss per target token of the last evaluation; None without data.valid, or where it was not finite."""
    best_loss: float | None
    metric: str
    """What the best was chosen by."""
    best_score: float | None
    """Its value at the best, where that isn't the loss."""
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
    fast_share: float | None
    """Share of the model's layers on the fast path, see `peftkit.methods.fast_share`; None on a CPU, which has none."""
    peak_memory_bytes: int
    """Most memory in use: of the GPU where there is one, else of the process since its start."""


def train(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, progress: OpenBar | None = None
) -> RunSummary:
    """Trains by `recipe` into its `out` folder and exports the adapter there.

    `resume` goes on from the last whole checkpoint, on a CPU with the bits an uninterrupted run has; `overwrite`
    replaces a run that is there. `progress` opens a display, `peftkit.cli.output.progress` or one like it; None shows
    nothing. The process's random generators are seeded, and SIGINT is handled while it trains when called in the main
    thread.
    Raises InputError's family for bad input, RunError for what fails while running, Interrupted after Ctrl-C.
    """
    (summary,) = train_runs(Runs((recipe,)), resume=resume, overwrite=overwrite, progress=progress)
    return summary


def train_runs(
    runs: Runs, *, resume: bool = False, overwrite: bool = False, progress: OpenBar | None = None
) -> list[RunSummary]:
    """Trains each of `runs` as `train` does, on one base that is loaded once, and gives what came of them in order.

    A turn ends as an interruption does, with a checkpoint, from which the run goes on at its next turn: the adapters
    are those of runs apart, bit for bit on a CPU. What is wrong with any run's folder or data is found before the first
    begins.
    """
    with ExitStack() as held:
        if _writes():
            for recipe in runs.recipes:
                held.enter_context(alone(_folder(recipe)))
        return _train_runs(runs, resume=resume, overwrite=overwrite, progress=progress)


def _writes() -> bool:
    """Whether this is the one of several processes that writes, as the launcher says: it isn't asked before."""
    return os.environ.get("RANK", "0") == "0"


def _train_runs(runs: Runs, *, resume: bool, overwrite: bool, progress: OpenBar | None) -> list[RunSummary]:
    for recipe in runs.recipes:
        check(_folder(recipe), resume=resume, overwrite=overwrite)
        if _writes():
            check_writable(_folder(recipe))
        if recipe.log.wandb:
            check_wandb()
    resident, rows = load(runs.recipes)
    resident.accelerator.wait_for_everyone()  # no folder is claimed while another process looks into it
    summaries: dict[int, RunSummary] = {}
    first = True
    prefixes = [f"{recipe.out}: " if len(runs.recipes) > 1 else "" for recipe in runs.recipes]
    while len(summaries) < len(runs.recipes):
        for index, recipe in enumerate(runs.recipes):
            if index in summaries:
                continue
            try:
                prepared = adapt(resident, recipe, rows[index], prefix=prefixes[index])
                summary = _turn(
                    prepared,
                    runs.turn_steps,
                    resume=resume or not first,
                    overwrite=overwrite and first,
                    progress=progress,
                    prefix=prefixes[index],
                )
            except PeftkitError as error:
                error.args = (f"{prefixes[index]}{error}",)
                raise
            finally:
                detach(resident.model)
            if summary is not None:
                summaries[index] = summary
        first = False
    return [summaries[index] for index in range(len(runs.recipes))]


def _turn(
    prepared: Prepared, steps: int | None, *, resume: bool, overwrite: bool, progress: OpenBar | None, prefix: str
) -> RunSummary | None:
    """Trains for so many steps, or to the end; then exports and says what came of it. `prefix` begins its lines."""
    recipe, is_main = prepared.recipe, prepared.accelerator.is_main_process
    out = _folder(recipe)
    checkpoint = _checkpoint(out) if resume else None
    record = prepared.record()
    trainer = Trainer(prepared, out, record, prefix=prefix)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        logger.info("%sgoing on from step %d of %d", prefix, checkpoint.state.step, trainer.total_steps)
    else:
        check_export(prepared)
        check_fits(prepared)
        if is_main:
            check_room(out, disk_bytes(num_trainable(prepared.model)), overwrite=overwrite)
    before = _answers(prepared) if checkpoint is None else _answers_before(out)
    prepared.accelerator.wait_for_everyone()
    facts = {**record, **base_record(prepared.model), "machine": machine(prepared.accelerator)}
    if is_main:
        claim(out, overwrite=overwrite)  # not before all else is known to be right
        if checkpoint is not None:
            put_back_best(checkpoint, out / BEST)
        write_json(out / RUN, {"status": "unfinished", **facts, "samples": _samples(prepared, before, None)})
    del checkpoint  # its weights and moments are the trainer's now
    bar = _open(progress, trainer, prefix) if is_main else _NoBar()
    try:
        state = trainer.state
        curves = recipe.log.tensorboard and is_main
        with MetricsLog(
            out if is_main else None,
            tensorboard=curves,
            wandb=recipe.log.wandb and is_main,
            step=state.step,
            evaluated=state.evaluated,
        ) as log:
            done = trainer.run(log, bar, steps=steps)
    finally:
        bar.close()
    if not done:
        return None
    samples = _samples(prepared, before, _answers(prepared))
    summary = None
    if is_main:
        summary = _summarise(prepared, trainer, _export(prepared, trainer, out))
        content = {**facts, "samples": samples, "summary": {**asdict(summary), "out": str(out)}}
        write_json(out / RUN, {"status": "finished", **content})
        write_report([out], out / REPORT)
    return gather(summary)[0]


def check_export(prepared: Prepared) -> None:
    """Writes the untrained adapter and reads it back, so that a long run can't fail at its end."""
    with TemporaryDirectory() as folder:
        written = save_adapter(prepared.model, Path(folder) / "adapter", **prepared.record())
        read = read_adapter(written.path, base=prepared.base, config=prepared.model.config)
        assert read.uid == written.uid, "an adapter is read as it was written"


def _folder(recipe: Recipe) -> Path:
    return Path(recipe.out).expanduser()


def _answers(prepared: Prepared) -> list[str]:
    """What the model answers now to the rows that are shown."""
    limits, positions = [SAMPLE_TOKENS] * len(prepared.shown), prepared.batch_positions
    with unequal_passes(prepared.model):
        answers = generate_answers(
            prepared.model, prepared.tokenizer, prepared.shown, limits, batch_positions=positions
        )
    return [answer.text for answer in answers]


def _answers_before(out: Path) -> list[str]:
    """What was answered before the first step of a run that goes on."""
    try:
        return [sample["before"] for sample in json.loads((out / RUN).read_bytes())["samples"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # only shown: a run goes on without


def _samples(prepared: Prepared, before: Sequence[str], after: Sequence[str] | None) -> list[dict[str, Any]]:
    return [
        {
            "where": example.where,
            "prompt": str(prepared.tokenizer.decode(list(example.prompt_ids))),
            "reference": example.reference,
            "before": before[index] if index < len(before) else None,
            "after": after[index] if after else None,
        }
        for index, example in enumerate(prepared.shown)
    ]


def _checkpoint(out: Path) -> Checkpoint | None:
    """The checkpoint to resume from; None where a run was stopped before its first."""
    checkpoint = latest_checkpoint(out / STATE)
    if checkpoint is None:
        if (out / CONFIG_FILE).exists() or (out / RECORD_FILE).exists():
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


def _open(progress: OpenBar | None, trainer: Trainer, prefix: str) -> Bar:
    if progress is None:
        return _NoBar()
    start = trainer.state.step
    description = "train" if start == 0 else f"train from step {start}"
    return progress(prefix + description, total=trainer.total_steps - start, unit="step")


def _export(prepared: Prepared, trainer: Trainer, out: Path) -> Artifact:
    """Writes the adapter into `out`: the best by evaluation where there is one, else the last."""
    last: dict[str, Any] = trainer.adapter_record()
    if prepared.valid is not None:
        save_adapter(prepared.model, out / LAST, **last)
    if trainer.state.best_step is None:
        return save_adapter(prepared.model, out, **last)
    best = read_adapter(out / BEST)
    return write_parts(out, [(part.config, part.tensors) for part in best.parts], without_own(best.record))


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
        metric=prepared.recipe.eval.metric,
        best_score=state.best_score,
        best_step=state.best_step,
        trainable_parameters=num_trainable(prepared.model),
        base_parameters=num_base(prepared.model),
        tokens=state.tokens,
        target_tokens=state.target_tokens,
        seconds=state.seconds,
        tokens_per_s=state.tokens / state.seconds if state.seconds else None,
        packed=prepared.packed,
        padding=1 - state.tokens / state.positions if state.positions else 0.0,
        fast_share=fast_share(prepared.model, prepared.longest),
        peak_memory_bytes=peak_memory(prepared.accelerator.device),
    )
