"""`peftkit merge`: adapters put into their base's weights, as a folder that other programs load, with proof."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from peftkit import resources
from peftkit.cli import output
from peftkit.cli.chosen import base_named_by
from peftkit.errors import InputError, RunError

if TYPE_CHECKING:
    from peftkit.base import BaseInfo
    from peftkit.merge import Check, Composition, Equivalence, MergeReport, Weight


def command(
    adapters: Annotated[list[str] | None, typer.Argument(metavar="ADAPTER...", help="The adapters' folders.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The new folder.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model; by default the one that the adapter names.")] = None,
    into: Annotated[
        Literal["dequantized", "original", "requantize"] | None,
        typer.Option(
            help="Merge into the base's NF4 weights, dequantised; into its original weights; or into NF4 again. By "
            "default into what the adapter was trained on, dequantised."
        ),
    ] = None,
    format: Annotated[
        Literal["hf", "bnb4", "gguf", "adapter"] | None,
        typer.Option(help="A folder for transformers; in four bits; a GGUF file; or the composed adapter alone."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "q8_0"],
        typer.Option(help="Type of the written weights; auto is the base's own, and float16 in GGUF."),
    ] = "auto",
    method: Annotated[
        Literal["exact", "svd", "ties", "dare_linear", "dare_ties"],
        typer.Option(help="How several adapters become one."),
    ] = "exact",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="W,W", help="A weight for each adapter, or a JSON file with a number or a list by layer for each."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of the composed adapter, for methods other than exact.")
    ] = None,
    density: Annotated[float | None, typer.Option(help="Share of entries that ties and dare keep.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes what dare drops.")] = 0,
    verify: Annotated[
        bool, typer.Option(help="Compare the written model's logits with those of base and adapter.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Only compare two folders, an adapter or model and a model.")
    ] = False,
    limit: Annotated[
        float | None, typer.Option(help="Largest relative difference that --check lets pass; by default of rounding.")
    ] = None,
) -> None:
    """Merge adapters into their base and write a plain model, with proof."""
    folders = [resources.find(adapter) for adapter in adapters or []]
    if check:
        _check(folders, base, limit)
        return
    if not folders or out is None:
        raise InputError("name the adapters to merge, and the new folder with --out", field="out")
    from peftkit.artifact import read_adapter
    from peftkit.base import resolve_base
    from peftkit.merge import compose_to_folder, merge_to_folder

    numbers = None if weights is None else _weights(weights)
    settings: dict[str, Any] = {"method": method, "rank": rank, "density": density, "seed": seed}
    if format == "adapter":
        made = compose_to_folder(folders, out, numbers, **settings)
        output.emit(
            {"out": out, "format": format, "uid": made.artifact.uid, "kept": made.kept}, lambda: _composed(made, out)
        )
        return
    info = resolve_base(base or base_named_by(read_adapter(folders[0])))
    composition = _compose(folders, info, numbers, settings)
    report = merge_to_folder(composition.artifact, out, info, into=into, format=format, dtype=dtype, verify=verify)
    result = {**asdict(report), "composed_kept": composition.kept}
    output.emit(result, lambda: _text(report, composition, len(folders)))


def _compose(
    folders: list[Path], info: "BaseInfo", weights: "list[Weight] | None", settings: dict[str, Any]
) -> "Composition":
    from peftkit.artifact import read_adapter
    from peftkit.merge import compose, mergeable

    artifacts = [read_adapter(folder, base=info) for folder in folders]
    for artifact in artifacts:
        mergeable(artifact)
    return compose(artifacts, weights, **settings)


def _weights(text: str) -> "list[Weight]":
    """From "0.7,0.3", or from a JSON file: a list with a number, or a list of a number for each layer."""
    try:
        path = Path(text)
        found = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else text.split(",")
        return [[float(n) for n in one] if isinstance(one, list) else float(one) for one in found]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"weights {text}: must be numbers with commas between, or a JSON file with a list of numbers and of lists "
            f"by layer ({error})",
            field="weights",
        ) from error


def _check(folders: list[Path], base: str | None, limit: float | None) -> None:
    from peftkit.merge import check

    if len(folders) != 2:
        raise InputError("--check compares two folders: peftkit merge --check A B", field="check")
    found = check(folders[0], folders[1], base=base, limit=limit)
    result = {**asdict(found), "holds": found.equivalence.holds}
    output.emit(result, lambda: _checked(found))
    if not found.equivalence.holds:
        raise RunError(
            f"{found.b} isn't {found.a}: their logits are {found.equivalence.relative:.2g} of their size apart, more "
            f"than {found.equivalence.limit:.2g}"
        )


def _text(report: "MergeReport", composition: "Composition", num_adapters: int) -> str:
    lines = [f"{report.num_merged} weights of {report.base} merged into the {report.mode} base"]
    if num_adapters > 1:
        lines[0] = f"{num_adapters} adapters, {_share(composition)}: {lines[0]}"
    lines.append(f"written to {report.out}: {report.dtype}, {report.num_bytes / 1e6:,.0f} MB")
    lines.append(_kept(report.kept, report.kept_by_layer))
    lines += ["not verified"] if report.equivalence is None else _figures(report.equivalence)
    return "\n".join(lines)


def _composed(composition: "Composition", out: Path) -> str:
    return f"composed adapter written to {out}, {_share(composition)}"


def _share(composition: "Composition") -> str:
    return f"whose rank holds {composition.kept:.1%} of the sought change"


def _kept(share: float, by_layer: dict[str, float]) -> str:
    least = min(by_layer, key=by_layer.__getitem__, default=None)
    where = "" if least is None else f"; least in {least}: {by_layer[least]:.2%}"
    return f"{share:.2%} of the change is kept{where}"


def _figures(found: "Equivalence") -> list[str]:
    return [
        f"logits against base and adapter over {found.num_prompts} prompts, {found.num_tokens} positions:",
        f"  largest difference {found.max_abs:.2g}, mean {found.mean_abs:.2g}, relative {found.relative:.2g} "
        f"(limit {found.limit:.2g}), KL {found.kl:.2g} nats",
        f"  the same most likely token at {found.greedy_agreement:.1%} of positions",
    ]


def _checked(found: "Check") -> str:
    figures = found.equivalence
    rows: list[list[object]] = [
        ["largest logit difference", figures.max_abs],
        ["mean logit difference", figures.mean_abs],
        ["relative difference", figures.relative],
        ["  limit", figures.limit],
        ["KL divergence, nats", figures.kl],
        ["same most likely token", figures.greedy_agreement],
        ["prompts", figures.num_prompts],
        ["positions", figures.num_tokens],
    ]
    if found.kept is not None:
        rows.append(["share of the change kept", found.kept])
        rows += [[f"  {layer}", share] for layer, share in (found.kept_by_layer or {}).items()]
    return output.table(["figure", "value"], rows)
