"""`peftkit base`: which base models can be named here, what one is, and fetching it ahead of time."""

from math import prod
from pathlib import Path
from typing import Any

import typer

from peftkit.cli import output

app = typer.Typer(help="Base models that can be named: the embedded default, a folder, a GGUF file, a hub id.")

_NAME = typer.Argument(help="An embedded name, a folder, a .gguf file or a hub id (org/name).", metavar="NAME")


@app.command("list")
def list_bases() -> None:
    """List the bases this machine has: embedded, converted from GGUF, and those in the hub's cache."""
    rows = [*_embedded(), *_converted(), *_hub_cached()]
    cells = [[row["name"], row["kind"], row["state"], _gigabytes(row["bytes"]), row["path"]] for row in rows]
    output.emit({"bases": rows}, lambda: output.table(["name", "kind", "state", "size", "path"], cells))


@app.command()
def info(name: str = _NAME) -> None:
    """Show what a base is: architecture, sizes, context, fingerprint and chat template."""
    from transformers import AutoConfig

    from peftkit.base import load_tokenizer, resolve_base
    from peftkit.base.folder import stored_tensors
    from peftkit.chat import chat_template_of

    base = resolve_base(name)
    config = AutoConfig.from_pretrained(base.path, local_files_only=True)
    tensors = stored_tensors(base.path)
    template = chat_template_of(load_tokenizer(base))
    result: dict[str, Any] = {
        "name": base.name,
        "path": base.path,
        "architecture": base.fingerprint.architecture,
        "parameters": sum(prod(tensor.shape) for tensor in tensors.values()),
        "dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
        "bytes": sum(tensor.num_bytes for tensor in tensors.values()),
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "fingerprint": base.fingerprint,
        "chat_template_sha256": template.sha256 if template else None,
    }
    parts = {part: getattr(base.fingerprint, part)[:12] for part in ("config", "weights", "tokenizer")}
    shown = {**result, "fingerprint": ", ".join(f"{part} {value}…" for part, value in parts.items())}
    width = max(map(len, shown))
    output.emit(result, "\n".join(f"{key.replace('_', ' ').ljust(width)}  {_shown(shown[key])}" for key in shown))


@app.command()
def fetch(name: str = _NAME) -> None:
    """Download or convert a base now, so that nothing has to wait for it later."""
    from peftkit.base import resolve_base

    base = resolve_base(name)
    result = {"name": base.name, "path": base.path, "fingerprint": base.fingerprint}
    output.emit(result, f"{base.name} is ready in {base.path}")


def _embedded() -> list[dict[str, Any]]:
    from peftkit.base import EMBEDDED
    from peftkit.base.convert import is_whole

    rows = []
    for base in EMBEDDED.values():
        if is_whole(base.directory):
            state, path = "ready", base.directory
        elif gguf := base.gguf():
            state, path = "converted at first use", gguf
        else:
            state, path = f"not installed: {base.install}", None
        rows.append({"name": base.name, "kind": "embedded", "state": state, "path": path, "bytes": _size(path)})
    return rows


def _converted() -> list[dict[str, Any]]:
    """Folders that were converted from local GGUF files."""
    from peftkit.base import EMBEDDED, cache_dir
    from peftkit.base.convert import PROVENANCE, is_whole
    from peftkit.base.folder import read_json

    embedded = {base.directory for base in EMBEDDED.values()}
    rows = []
    for record in sorted((cache_dir() / "bases").glob(f"*/{PROVENANCE}")):
        folder = record.parent
        if folder not in embedded and is_whole(folder):
            source = read_json(record)["source"]["file"]
            rows.append({"name": source, "kind": "gguf", "state": "ready", "path": folder, "bytes": _size(folder)})
    return rows


def _hub_cached() -> list[dict[str, Any]]:
    """Snapshots in the hub's cache that can be used as they are."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    from peftkit.base.folder import check_folder
    from peftkit.errors import BaseModelError

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    rows = []
    for repository in sorted(repositories, key=lambda found: found.repo_id):
        for revision in repository.revisions:
            try:
                check_folder(revision.snapshot_path)
            except BaseModelError:
                continue
            rows.append(
                {
                    "name": repository.repo_id,
                    "kind": "hub",
                    "state": "ready",
                    "path": revision.snapshot_path,
                    "bytes": revision.size_on_disk,
                }
            )
    return rows


def _size(path: Path | None) -> int | None:
    if path is None:
        return None
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def _gigabytes(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 1e9:.2f} GB"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
