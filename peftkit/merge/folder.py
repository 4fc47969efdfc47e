"""A folder that appears whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from peftkit.errors import InputError, RunError

_ROOM_MARGIN_BYTES = 64 << 20
"""For what lies beside the weights: tokenizer, configs, the file system's own books."""


def check_target(path: Path) -> None:
    """Raises InputError unless `path` can become a new folder: it doesn't exist, or is an empty one and no link."""
    if path.is_symlink():
        raise InputError(f"out: {path} is a symbolic link: name the folder that it points to", field="out")
    if path.is_dir():
        if any(path.iterdir()):
            raise InputError(f"out: {path} exists and isn't empty: choose another folder, or remove it", field="out")
    elif path.exists():
        raise InputError(f"out: {path} is a file: choose another name", field="out")


def check_room(path: Path, num_bytes: int) -> None:
    """Raises RunError unless the disk of the folder-to-be `path` has room for `num_bytes` of weights."""
    place = next(folder for folder in path.absolute().parents if folder.exists())
    needed, free = num_bytes + _ROOM_MARGIN_BYTES, shutil.disk_usage(place).free
    if free < needed:
        raise RunError(f"no room for {path}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path`, which becomes `path` when the block ends without an error.

    Whatever goes wrong, the temporary folder is removed and `path` is as it was before. Raises InputError when `path`
    is taken, RunError when it can't be written.
    """
    check_target(path)
    staging = path.absolute().parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        staging.mkdir(parents=True)
        yield staging
        _sync(staging)
        os.replace(staging, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(path) from error
        raise RunError(f"can't write {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error) or f"os error {errno.EDQUOT}" in str(error):
            raise _no_room(path) from error
        raise RunError(f"can't write {path}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def folder_bytes(path: Path) -> int:
    """Size of all files of a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _no_room(path: Path) -> RunError:
    return RunError(f"no room on the disk to write {path}: free some space and run again")


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
