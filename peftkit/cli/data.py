"""`peftkit data check RECIPE.yaml|FILE [--base B]`"""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import typer

from peftkit.cli import output
from peftkit.errors import InputError

if TYPE_CHECKING:
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
    from peftkit.data.audit import audit_source, check_overlap
    from peftkit.data.dataset import Encoding
    from peftkit.data.sources import open_source

    typed = {"valid": valid, "format": format, "turns": turns, "max_length": max_length, "too_long": too_long}
    named, data = _settings(what, {field: value for field, value in typed.items() if value is not None})
    if (base or named) is None:
        raise InputError("name the base whose tokenizer reads the data with --base", field="base")
    tokenizer = load_tokenizer(resolve_base(str(base or named)))
    encoding = Encoding(tokenizer, data.max_length, data.format, data.turns, data.too_long == "drop")
    found = {
        part: audit_source(open_source(name, streaming=data.streaming), encoding, max_rows=rows or None, num_shown=show)
        for part, name in (("train", data.train), ("valid", data.valid))
        if name
    }
    if "valid" in found and not data.allow_overlap:
        check_overlap(found["train"][1], found["valid"][1])
    audits = {part: audit for part, (audit, _) in found.items()}
    output.emit({part: _facts(audit) for part, audit in audits.items()}, lambda: _text(list(audits.values())))


def _settings(what: str, typed: dict[str, object]) -> tuple[str | None, "Data"]:
    """The base that a recipe names, or None, and how data is read, with what was typed in its place."""
    from peftkit.recipe import Data, load_recipe

    if what.lower().endswith((".yaml", ".yml")):
        recipe = load_recipe(what, [f"data.{field}={value}" for field, value in typed.items()])
        return recipe.base, recipe.data
    return None, Data.model_validate({"train": what, **typed})


def _facts(audit: "Audit") -> dict[str, object]:
    return {**asdict(audit), "trained_share": audit.trained_share}


def _text(audits: list["Audit"]) -> str:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return "\n\n".join(audit.text(color=color) for audit in audits)
