"""`peftkit export`: the adapter alone, in another program's format."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from peftkit import resources
from peftkit.cli import output
from peftkit.cli.chosen import base_named_by
from peftkit.errors import BaseModelError


def command(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="The adapter's folder.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The new folder.")],
    format: Annotated[
        Literal["peft", "gguf", "adapters"],
        typer.Option(
            help="peft: a folder for HF PEFT and vLLM; gguf: a LoRA for llama.cpp; adapters: bottleneck adapters for "
            "the adapters library."
        ),
    ] = "peft",
    base_name: Annotated[
        str | None,
        typer.Option(help="What the export calls its base: a hub id or path; by default where the base lies here."),
    ] = None,
) -> None:
    """Write an adapter in another program's format."""
    from peftkit.artifact import read_adapter
    from peftkit.merge import export_adapters, export_gguf, export_peft

    folder = resources.find(adapter)
    named = base_name or base_named_by(read_adapter(folder))
    name = named if base_name or format == "gguf" else _found_here(named)
    if format == "gguf":
        exported, reader = export_gguf(folder, out, named), "llama.cpp"
    elif format == "peft":
        exported, reader = export_peft(folder, out, base_name=name), "HF PEFT"
    else:
        exported = export_adapters(folder, out, base_name=name)
        reader = "the adapters library, load_adapter(…, use_safetensors=True)"
    result = {"out": out, "format": format, "base_name": name, "uid": exported.uid, "kind": exported.kind}
    output.emit(result, f"{exported.kind} adapter written to {out} for {reader}, on base {name}")


def _found_here(base: str) -> str:
    """What transformers opens the recorded base by on this machine."""
    from peftkit.merge import transformers_name

    try:
        return transformers_name(base)
    except BaseModelError as error:
        raise BaseModelError(
            f"{error}\nor say what the export is to call its base: --base-name", field="base"
        ) from error
