"""`peftkit adapters`: a folder of adapters, each under its name, as `peftkit serve --adapters` serves them."""

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peftkit import resources
from peftkit.cli import output
from peftkit.errors import AdapterError, InputError, PeftkitError, did_you_mean

if TYPE_CHECKING:
    from peftkit.artifact import Artifact
    from peftkit.merge import ModuleDiff

app = typer.Typer(help="A folder of adapters: list, show, add, remove, verify, diff.")

Store = Annotated[
    Path | None,
    typer.Option("--adapters", metavar="DIR", help="The folder of adapters; by default in peftkit's own folder."),
]
Named = Annotated[str, typer.Argument(metavar="ADAPTER", help="A name in the store, or an adapter's folder.")]
Base = Annotated[str | None, typer.Option(help="Base model; by default the one that the adapter names.")]
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@app.command("list")
def list_adapters(adapters: Store = None) -> None:
    """List the adapters of the store."""
    rows = [_facts(folder.name, folder) for folder in _folders(_store(adapters))]
    cells = [[row["name"], row["kind"], row["base"], (row["uid"] or "")[:12], row["error"]] for row in rows]
    output.emit({"adapters": rows}, lambda: output.table(["name", "kind", "base", "uid", "error"], cells))


@app.command()
def show(adapter: Named, adapters: Store = None) -> None:
    """Show what an adapter is and how it was made."""
    from peftkit.artifact import read_adapter
    from peftkit.merge import named_base

    artifact = read_adapter(_find(adapter, adapters))
    result: dict[str, Any] = {
        "path": artifact.path,
        "kind": artifact.kind,
        "uid": artifact.uid,
        "base": _base_name(artifact, named_base),
        "bytes": sum(tensor.nbytes for part in artifact.parts for tensor in part.tensors.values()),
        "configs": [part.config.model_dump(mode="json") for part in artifact.parts],
        "record": artifact.record,
    }
    shown = ("path", "kind", "uid", "base", "bytes")
    metrics = [f"{name:6} {value}" for name, value in (artifact.record.get("metrics") or {}).items()]
    output.emit(result, "\n".join([*(f"{name:6} {result[name]}" for name in shown), *metrics]))


@app.command()
def add(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="Folder of HF PEFT, torchtune or the adapters library, or loralib's file."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Its name in the store; by default the folder's.")] = None,
    base: Base = None,
    alpha: Annotated[
        float | None, typer.Option(help="lora_alpha of a microsoft/LoRA file, which doesn't say it.")
    ] = None,
    adapters: Store = None,
) -> None:
    """Take an adapter into the store, whichever of the known programs made it."""
    from peftkit.artifact import read_adapter, write_parts
    from peftkit.artifact.microsoft import read_microsoft_lora
    from peftkit.base import resolve_base
    from peftkit.merge import named_base
    from peftkit.merge.folder import check_room, new_folder

    source = resources.find(source)
    name = name or (source.stem if source.is_file() else source.resolve().name)
    if not _NAME.fullmatch(name):
        raise InputError(f"name {name}: must be of letters, digits, '.', '_' and '-'", field="name")
    target = _store(adapters) / name
    if target.exists():
        raise InputError(f"name: there is an adapter {name} in {target.parent}: choose another --name", field="name")
    info = None if base is None else resolve_base(base)
    if source.is_file():
        parts, record = [read_microsoft_lora(source, alpha=alpha)], {}
    else:
        _refuse_torchtunes_own(source)
        artifact = read_adapter(source, base=info)
        parts, record = [(part.config, part.tensors) for part in artifact.parts], dict(artifact.record)
        if not record:
            record = {"base": {"id": _base_name(artifact, named_base)}}
    if info is not None and not record.get("base", {}).get("fingerprint"):
        record["base"] = {**_record_of(info), "id": info.name}
    check_room(target, sum(tensor.nbytes for _, tensors in parts for tensor in tensors.values()))
    with new_folder(target) as staging:
        write_parts(staging, parts, record)
        read_adapter(staging, base=info)  # a file without a config is checked against the base only here
    added = read_adapter(target)
    result = {"name": name, "path": target, "uid": added.uid, "kind": added.kind}
    output.emit(result, f"{added.kind} adapter {name} added to {target.parent}, uid {added.uid[:12]}")


@app.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME")], adapters: Store = None) -> None:
    """Remove an adapter from the store."""
    store = _store(adapters)
    names = [folder.name for folder in _folders(store)]
    if name not in names:
        raise InputError(f"name: there is no adapter {name} in {store}{did_you_mean(name, names)}", field="name")
    shutil.rmtree(store / name)
    output.emit({"name": name, "path": store / name}, f"{name} removed from {store}")


@app.command()
def verify(adapter: Named, base: Base = None, adapters: Store = None) -> None:
    """Check an adapter against its base: shapes, finite values, fingerprint, and every tensor."""
    from peftkit.artifact import read_adapter
    from peftkit.base import resolve_base
    from peftkit.cli.chosen import base_named_by

    folder = _find(adapter, adapters)
    info = resolve_base(base or base_named_by(read_adapter(folder)))
    artifact = read_adapter(folder, base=info)
    recorded = (artifact.record.get("base") or {}).get("fingerprint") or {}
    same = [part for part, value in asdict(info.fingerprint).items() if recorded.get(part) == value]
    num_tensors = sum(len(part.tensors) for part in artifact.parts)
    result = {"path": folder, "uid": artifact.uid, "base": info.name, "tensors": num_tensors, "same_as_recorded": same}
    known = f"its recorded base has the same {', '.join(same)}" if recorded else "it doesn't say which base it is for"
    output.emit(result, f"all {num_tensors} tensors of {folder} are applied to {info.name}; {known}")


@app.command()
def diff(a: Named, b: Named, adapters: Store = None) -> None:
    """Compare two LoRAs by layer: norms of their changes, and the overlap of their directions."""
    from peftkit.artifact import read_adapter
    from peftkit.merge import by_layer
    from peftkit.merge import diff as compared

    modules = compared(*(read_adapter(_find(name, adapters)) for name in (a, b)))
    layers = by_layer(modules)
    result = {"layers": [asdict(layer) for layer in layers], "modules": [asdict(module) for module in modules]}
    output.emit(result, lambda: _table(layers))


def _table(layers: "list[ModuleDiff]") -> str:
    headers = ["layer", "norm A", "norm B", "cosine", "input overlap", "output overlap"]
    return output.table(headers, [list(asdict(layer).values()) for layer in layers])


def _store(given: Path | None) -> Path:
    from peftkit.base import cache_dir

    return cache_dir() / "adapters" if given is None else given.expanduser()


def _folders(store: Path) -> list[Path]:
    return sorted(folder for folder in store.glob("[!.]*") if folder.is_dir())


def _find(name: str, adapters: Path | None) -> Path:
    """An adapter by its name in the store, else by its folder."""
    stored = _store(adapters) / name
    return stored if _NAME.fullmatch(name) and stored.is_dir() else resources.find(name)


def _facts(name: str, folder: Path) -> dict[str, Any]:
    from peftkit.artifact import read_adapter
    from peftkit.merge import named_base

    try:
        artifact = read_adapter(folder)
    except PeftkitError as error:
        return {"name": name, "path": folder, "kind": None, "base": None, "uid": None, "error": str(error)}
    base = _base_name(artifact, named_base)
    return {"name": name, "path": folder, "kind": artifact.kind, "base": base, "uid": artifact.uid, "error": None}


def _base_name(artifact: "Artifact", named_base: Any) -> str | None:
    """The base's name, from the record or from the adapter's own file; of two methods only the record has it."""
    recorded = (artifact.record.get("base") or {}).get("id")
    return recorded or (named_base(artifact) if len(artifact.parts) == 1 else None)


def _record_of(info: Any) -> dict[str, Any]:
    """What a record says of a base."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(info.path, local_files_only=True)
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "hidden_size": config.hidden_size,
        "fingerprint": asdict(info.fingerprint),
    }


def _refuse_torchtunes_own(source: Path) -> None:
    """torchtune writes HF PEFT's files beside its own; with only its own there is nothing that is read."""
    if source.is_dir() and not (source / "adapter_config.json").exists():
        if own := sorted(source.glob("adapter_*.pt")):
            raise AdapterError(
                f"{own[-1]} is torchtune's own checkpoint, which is pickled and isn't loaded: let its checkpointer "
                "write adapter_model.safetensors and adapter_config.json, as it does for Hugging Face models"
            )
