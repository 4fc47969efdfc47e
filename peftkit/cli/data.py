"""`peftkit data check RECIPE.yaml|FILE [--base B]`"""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import typer

from peftkit.cli import output
from peftkit.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peftkit.data import Audit
    from peftkit.recipe import Data

app = typer.Typer(help="Training data: check what would be trained.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Training data: check what would be trained."""


@app.command()
def check(
    what: str = typer.Argument(
        ...,
        metavar="RECIPE.yaml|DATA",
        help="A recipe, or data: a JSONL, JSON, CSV, Parquet or text file, a folder of datasets, a hub id.",
    ),
    base: str = typer.Option(None, "--base", help="The base whose tokenizer reads the data; a recipe names its own."),
    valid: str = typer.Option(None, "--valid", help="Held-out rows, which must not be among the training rows."),
    format: Literal["auto", "completion", "chat", "instruction", "text"] = typer.Option(
        None, "--format", help="What rows hold; auto goes by the first row."
    ),
    turns: Literal["all", "last"] = typer.Option(None, "--turns", help="Which of a chat's answers are trained."),
    max_length: int = typer.Option(None, "--max-length", min=2, help="Most tokens of a row."),
    too_long: Literal["error", "drop"] = typer.Option(
        None, "--too-long", help="What becomes of a row whose answer doesn't fit."
    ),
    rows: int = typer.Option(
        20_000, "--rows", min=0, help="Rows to encode, drawn at random from more; 0 encodes all. All rows are read."
    ),
    show: int = typer.Option(3, "--show", min=0, help="Samples to show, trained tokens marked."),
) -> None:
    """Read data as training would: counts, lengths, what is cut, and samples with what is trained marked."""
    from peftkit.base import load_tokenizer, resolve_base

    typed = {"valid": valid, "format": format, "turns": turns, "max_length": max_length, "too_long": too_long}
    named, sets = _settings(what, {field: value for field, value in typed.items() if value is not None})
    if (base or named) is None:
        raise InputError(
            "name the base whose tokenizer reads the data with --base, as in --base smollm2-135m", field="base"
        )
    tokenizer = load_tokenizer(resolve_base(str(base or named)))
    checked = [_audits(data, tokenizer, rows or None, show) for data in sets]
    facts = [{part: _facts(audit) for part, audit in audits.items()} for audits in checked]
    output.emit(
        facts[0] if len(facts) == 1 else {"runs": facts},
        lambda: _text([audit for audits in checked for audit in audits.values()]),
    )


def _audits(
    data: "Data", tokenizer: "PreTrainedTokenizerBase", max_rows: int | None, num_shown: int
) -> dict[str, "Audit"]:
    """The figures of training and held-out rows. Raises DataError for what is wrong with either, or both."""
    from peftkit.data.audit import audit_source, check_overlap
    from peftkit.data.dataset import Encoding
    from peftkit.data.sources import open_source

    encoding = Encoding(tokenizer, data.max_length, data.format, data.turns, data.too_long == "drop")
    found = {
        part: audit_source(
            open_source(name, streaming=data.streaming), encoding, max_rows=max_rows, num_shown=num_shown
        )
        for part, name in (("train", data.train or ""), ("valid", data.valid))
        if name is not None
    }
    if "valid" in found and not data.allow_overlap:
        check_overlap(found["train"][1], found["valid"][1])
    return {part: audit for part, (audit, _) in found.items()}


def _settings(what: str, typed: dict[str, object]) -> tuple[str | None, list["Data"]]:
    """The base that a recipe names, or None, and how each of its runs reads data, with what was typed in its place."""
    from peftkit.recipe import Data, load_runs

    if what.lower().endswith((".yaml", ".yml")):
        recipes = load_runs(what, [f"data.{field}={value}" for field, value in typed.items()]).recipes
        return recipes[0].base, list(dict.fromkeys(recipe.data for recipe in recipes))
    return None, [Data.model_validate({"train": what, **typed})]


def _facts(audit: "Audit") -> dict[str, object]:
    return {**asdict(audit), "trained_share": audit.trained_share}


def _text(audits: list["Audit"]) -> str:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return "\n\n".join(audit.text(color=color) for audit in audits)
