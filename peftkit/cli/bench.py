"""`peftkit bench`: what this machine does, beside peers and floors."""

import json
from pathlib import Path
from typing import Any

import typer

from peftkit.cli import output
from peftkit.errors import InputError, RunError

app = typer.Typer(help="Benchmarks: one JSON line a case, then a table.")


@app.callback()
def _group() -> None:
    """Benchmarks: one JSON line a case, then a table."""


@app.command()
def kernels(
    out: Path | None = typer.Option(
        None, "--out", help="A file that each JSON line is also written to.", metavar="FILE"
    ),
    only: list[str] | None = typer.Option(
        None,
        "--only",
        help="Cases with this in their name (grouped_lora, rows=64, …); may be repeated.",
        metavar="NAME",
    ),
    quick: bool = typer.Option(False, "--quick", help="The few most telling cases: about a minute."),
    peers: bool = typer.Option(True, "--peers/--no-peers", help="Time cuBLAS, SDPA, bitsandbytes and vLLM too."),
    tune: bool = typer.Option(
        False, "--tune", help="Time each kernel's configurations and print the best of each case."
    ),
    tune_limit: int = typer.Option(48, "--tune-limit", help="Most configurations tried a case.", min=1),
    seed: int = typer.Option(0, "--seed", help="Of the random inputs."),
) -> None:
    """Time every kernel on the shapes of Llama-3.1-8B and Qwen2.5-1.5B, beside its floor, its goal and its peers."""
    from peftkit_bench.kernels import all_cases, run

    if missing := run.missing_gpu():
        raise RunError(f"peftkit bench kernels {missing}")
    cases = run.chosen(all_cases(), only or [], quick)
    if not cases:
        names = ", ".join(sorted({case.kernel for case in all_cases()}))
        raise InputError(
            f"--only {' '.join(only or [])}: no case has that in its name; kernels are {names}", field="only"
        )
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out}: {out.parent} is no folder", field="out")
    facts = run.facts(seed)
    lines: list[dict[str, Any]] = []
    writer = None if out is None else out.open("w", encoding="utf-8")
    try:
        source = _tuned(cases, seed, tune_limit) if tune else run.measure(cases, seed, with_peers=peers)
        with output.progress("bench kernels", total=len(cases), unit="case") as bar:
            for line in source:
                text = json.dumps({**line, **facts}, ensure_ascii=False)
                output.stream(text + "\n")
                if writer is not None:
                    writer.write(text + "\n")
                    writer.flush()
                lines.append(line)
                bar.update(1)
    finally:
        if writer is not None:
            writer.close()
    output.emit(
        {**facts, "cases": lines}, lambda: _tuned_table(lines) if tune else output.table(run.HEADERS, run.rows(lines))
    )
    if any(run.failed(line) for line in lines):
        raise typer.Exit(1)


def _tuned(cases: Any, seed: int, limit: int) -> Any:
    from peftkit_bench.kernels.tune import tune

    return tune(cases, seed, limit)


def _tuned_table(lines: list[dict[str, Any]]) -> str:
    rows = [
        [line["tune"], line["default_us"], best["us"], best["config"]] for line in lines for best in line["best"][:1]
    ]
    return output.table(("case", "default µs", "best µs", "configuration"), rows)
