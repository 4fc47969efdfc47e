"""The folder for what is made once and kept: converted bases and hashes of large files."""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """PEFTKIT_HOME, else XDG_CACHE_HOME/peftkit, else ~/.cache/peftkit. It need not exist yet."""
    if home := os.environ.get("PEFTKIT_HOME"):
        return Path(home).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "peftkit"
    return Path.home() / ".cache" / "peftkit"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file as hex; remembered until its size or time of change differs."""
    return remembered_hash("file", [path], lambda: _digest(path))


def remembered_hash(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """A hash over `files`, kept in the cache under their real paths, sizes and times of change.

    `kind` keeps different hashes of the same files apart.
    """
    stamp = [kind]
    for file in files:
        status = file.stat()
        stamp.append(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}")
    kept = cache_dir() / "hashes" / hashlib.sha256("\n".join(stamp).encode()).hexdigest()
    if kept.is_file() and re.fullmatch(r"[0-9a-f]{64}", known := kept.read_text(encoding="ascii", errors="replace")):
        return known
    value = compute()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(value)
        os.replace(file.name, kept)
    except OSError as error:  # a cache that can't be written costs time, nothing else
        logger.info("the hash of %s is not kept: %s", files[0], error)
    return value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
