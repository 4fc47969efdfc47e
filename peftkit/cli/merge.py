"""`peftkit merge`: an adapter put into its base's weights, as a folder that any program loads, with proof."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from peftkit import resources
from peftkit.cli import output
from peftkit.cli.chosen import base_named_by

if TYPE_CHECKING:
    from peftkit.merge import MergeReport


def command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="The adapter's folder.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    base: Annotated[str | None, typer.Option(help="Base model; by default the one that the adapter names.")] = None,
    into: Annotated[
        Literal["dequantized", "original"] | None,
        typer.Option(
            help="Merge into the base's NF4 weights, dequantised, or into its original weights; by default "
            "into what the adapter was trained on."
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the written weights; auto is the base's own."),
    ] = "auto",
    verify: Annotated[
        bool, typer.Option(help="Compare the written model's logits with those of base and adapter.")
    ] = True,
) -> None:
    """Merge an adapter into its base and write a plain model, with proof."""
    from peftkit.artifact import read_adapter
    from peftkit.merge import merge_to_folder

    folder = resources.find(adapter)
    named = base or base_named_by(read_adapter(folder))
    report = merge_to_folder(folder, out, named, into=into, dtype=dtype, verify=verify)
    output.emit(asdict(report), lambda: _text(report))


def _text(report: "MergeReport") -> str:
    lines = [
        f"{report.num_merged} weights of {report.base} merged into the {report.mode} base",
        f"written to {report.out}: {report.dtype}, {report.num_bytes / 1e6:,.0f} MB",
    ]
    if report.equivalence is None:
        lines.append("not verified")
    else:
        found = report.equivalence
        lines += [
            f"logits against base and adapter over {found.num_prompts} prompts, {found.num_tokens} positions:",
            f"  largest difference {found.max_abs:.2g}, mean {found.mean_abs:.2g}, relative {found.relative:.2g} "
            f"(limit {found.limit:.2g})",
            f"  the same most likely token at {found.greedy_agreement:.1%} of positions",
        ]
    return "\n".join(lines)
