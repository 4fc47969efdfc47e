"""`peftkit train RECIPE.yaml [key.path=value ...]`"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peftkit.cli import output

if TYPE_CHECKING:
    from peftkit.train import DryRun, RunSummary


def command(
    recipe: str = typer.Argument(..., metavar="RECIPE.yaml", help="The recipe, a file or one that peftkit ships."),
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY.PATH=VALUE]...", help="Settings in place of the recipe's, as optim.lr=1e-3."
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on from the last good checkpoint in the out folder."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a run that is in the out folder."),
    deploy: Path | None = typer.Option(
        None,
        "--deploy",
        metavar="DIR",
        help="Put the adapter into DIR too, under the out folder's name: a server that watches DIR serves it.",
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Show parameters, memory and a sample with its loss mask; train nothing."
    ),
) -> None:
    """Fine-tune by recipe."""
    from peftkit import train
    from peftkit.recipe import load_runs

    runs = load_runs(recipe, overrides or [])
    if deploy is not None:
        train.check_deployment(runs, deploy)
    if dry_run:
        plans = train.dry_runs(runs)
        if train.is_main_process():
            _emit(plans, _plan_text)
    else:
        summaries = train.train_runs(runs, resume=resume, overwrite=overwrite, progress=output.progress)
        if train.is_main_process():
            if deploy is not None:
                for summary in summaries:
                    output.note(f"deployed to {train.deploy(summary.out, deploy)}")
            _emit(summaries, _summary_text)
    train.leave()


def _emit(results: Sequence[Any], text: Callable[[Any], str]) -> None:
    """One run's result by itself, several as a list."""
    result = vars(results[0]) if len(results) == 1 else {"runs": results}
    names = [""] if len(results) == 1 else [f"{each.out}: " for each in results]
    output.emit(result, lambda: "\n\n".join(name + text(each) for name, each in zip(names, results, strict=True)))


def _plan_text(plan: "DryRun") -> str:
    share = plan.trainable_parameters / plan.base_parameters
    lines = [
        f"base {plan.base}: {plan.base_parameters:,} parameters; trainable {plan.trainable_parameters:,} ({share:.2%})",
        f"train {_data_text(plan.train)}",
        *([f"valid {_data_text(plan.valid)}"] if plan.valid else []),
        f"{plan.steps:,} steps",
        (
            f"rows packed: {plan.padding:.1%} padding instead of {plan.unpacked_padding:.1%}"
            if plan.packed
            else f"{plan.padding:.1%} padding"
        ),
        "",
        "memory while training (an estimate)",
        *(f"  {name:<12}{_megabytes(size):>10}" for name, size in plan.memory.parts().items()),
        f"  {'total':<12}{_megabytes(plan.memory_total):>10}",
        f"  {'recomputed':<12}{plan.recompute:>10}",
        plan.wont_fit or f"  {'available':<12}{_megabytes(plan.memory_available):>10}",
        "",
        f"{plan.sample_where}, what is trained in [[ ]]:",
        "".join(f"[[{piece.text}]]" if piece.trained else piece.text for piece in plan.sample),
    ]
    return "\n".join(lines)


def _data_text(facts: dict[str, str | int]) -> str:
    cut = f", {facts['truncated_rows']:,} rows cut" if facts["truncated_rows"] else ""
    return (
        f"{facts['path']}: {facts['rows']:,} rows, {facts['tokens']:,} tokens, {facts['target_tokens']:,} trained{cut}"
    )


def _summary_text(summary: "RunSummary") -> str:
    rate = f", {summary.tokens_per_s:.0f} tokens/s" if summary.tokens_per_s else ""
    peak = _megabytes(summary.peak_memory_bytes)
    padding = f"{summary.padding:.1%} of what was computed was padding" + (", rows packed" if summary.packed else "")
    lines = [f"{summary.steps:,} steps in {summary.seconds:.0f} s{rate}, peak memory {peak}", padding]
    if summary.fast_share is not None:
        lines.append(f"{summary.fast_share:.1%} of the model's layers on the fast path")
    if summary.train_loss is not None:
        lines.append(f"loss {summary.train_loss:.4f} at the last step")
    if summary.best_step is not None:
        figures = [] if summary.best_score is None else [f"{summary.metric} {summary.best_score:.4f}"]
        figures += [] if summary.best_loss is None else [f"evaluation loss {summary.best_loss:.4f}"]
        lines.append(f"{', '.join(figures)} at step {summary.best_step}, the best")
    if summary.skipped_steps:
        lines.append(f"{summary.skipped_steps} steps were skipped: loss or gradient not finite")
    if summary.stopped_early:
        lines.append("stopped early: no better evaluation came")
    lines.append(f"adapter ({summary.exported}) in {summary.out}")
    return "\n".join(lines)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
