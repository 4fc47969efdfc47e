"""Writing an adapter folder, so that at no moment a half-written one looks whole."""

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from peftkit.artifact.adapters_library import LIBRARY_TENSOR_FILE, to_adapters_library
from peftkit.artifact.files import CONFIG_FILE, RECORD_FILE, TENSOR_FILE
from peftkit.artifact.identity import uid_of, uid_of_parts
from peftkit.artifact.peft_format import from_peft, to_peft
from peftkit.artifact.reader import Artifact, Part, base_of
from peftkit.errors import RunError
from peftkit.methods import AnyConfig


def write_adapter(
    path: str | Path, config: AnyConfig, tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None = None
) -> Artifact:
    """`write_parts` for one method with its tensors by PEFT key."""
    return write_parts(path, [(config, tensors)], record)


def write_parts(
    path: str | Path,
    parts: Sequence[tuple[AnyConfig, Mapping[str, Tensor]]],
    record: Mapping[str, Any] | None = None,
) -> Artifact:
    """Writes an HF PEFT folder with `peftkit.json` beside it and returns what a reader would find there.

    Of several parts each is such a folder inside, called by its kind. `record` is what is known of the adapter's making
    (base, recipe, metrics, …) as JSON values. In a folder that exists only the adapter's own files are replaced. When
    there is no room (RunError), what was there before is still there, whole.
    """
    folder = Path(path)
    record = {**(record or {}), "format": 1}
    files: dict[str, bytes] = {}
    settled: list[Part] = []
    for config, tensors in parts:
        own = f"{config.kind}/" if len(parts) > 1 else ""
        part, peft_config = _settled(config, tensors, record, str(folder / own / CONFIG_FILE))
        settled.append(part)
        files[own + TENSOR_FILE] = safetensors.torch.save(part.tensors, metadata={"format": "pt"})
        if own:
            files[own + RECORD_FILE] = _json({**record, "uid": uid_of(part.config, part.tensors)})
        # sorted by field only: the first key of rank_pattern that matches wins
        files[own + CONFIG_FILE] = _json(dict(sorted(peft_config.items())), sort_keys=False)
    record["uid"] = uid_of_parts([(part.config, part.tensors) for part in settled])
    if len(parts) > 1:
        record["parts"] = [part.config.kind for part in settled]
    marker = RECORD_FILE if len(parts) > 1 else CONFIG_FILE
    ordered = {RECORD_FILE: _json(record), **files}
    ordered[marker] = ordered.pop(marker)  # the last file makes the folder valid
    write_files(folder, ordered)
    return Artifact(folder, tuple(settled), record["uid"], record)


def _settled(
    config: AnyConfig, tensors: Mapping[str, Tensor], record: Mapping[str, Any], where: str
) -> tuple[Part, dict[str, Any]]:
    """A part as it will be read back, with what was left open ("all-linear", the start of a prompt) now settled, and
    its config's fields in HF PEFT's names."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    peft_config = to_peft(config, base_of(record), tensors)
    return Part(from_peft(peft_config, where), tensors), peft_config


def write_adapters_library(
    path: str | Path, artifact: Artifact, *, name: str = "adapter", base_name: str | None = None
) -> None:
    """Writes a bottleneck adapter as a folder for the `adapters` library's `load_adapter(path, use_safetensors=True)`.

    `name` is what the library calls the adapter, `base_name` what the folder calls its base: by default as the
    adapter's record does. Raises UnsupportedError for another method, AdapterError when the record doesn't say enough
    of the base, InputError for a name that the library can't use, RunError when there is no room.
    """
    base = base_of(artifact.record)
    base = {**base, "id": base_name or base.get("id")}
    fields, tensors = to_adapters_library(artifact.config, artifact.tensors, base, name)
    files = {
        LIBRARY_TENSOR_FILE: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        CONFIG_FILE: _json(fields),
    }
    write_files(Path(path), files)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Puts files, by name or by path, into a folder: all are written and synced under temporary names before the
    first is renamed.

    The last file is the one whose presence makes the folder valid: it is taken away first and put back last. Raises
    RunError when there is no room, and leaves the folder as it was.
    """
    existed = folder.exists()
    staging = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        staging.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            with open(staging / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if not existed:
            os.replace(staging, folder)
            return
        *others, marker = files
        (folder / marker).unlink(missing_ok=True)
        for name in (*others, marker):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, folder / name)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"no room on the disk to write {folder}: free some space and run again") from error
        raise RunError(f"can't write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _json(value: Mapping[str, Any], *, sort_keys: bool = True) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=False) + "\n").encode()
