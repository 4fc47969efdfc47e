"""An adapter's files on their way in: bounded, named from a short list, and kept under the hash of their bytes.

    incoming/<random>/     what arrives, and what is being removed
    content/<digest>/      what was found good; never changes
    unsettled/<digest>     a note that it may be under `content/` without a version, or is about to be

A folder appears under `content/` by one rename, after its files are on the disk, and goes by one. A process that is
killed between that and the database's change leaves the note, which the next one looks at.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, cast

from peftkit.errors import AdapterError, TooLargeError
from peftkit_serve.tenants import archives

_FILE = re.compile(r"(?:[a-z][a-z0-9_]{0,31}/)?(adapter_config\.json|adapter_model\.safetensors|peftkit\.json)")
_PACKED = re.compile(rf"(?:(?!\.\.?/)[^/]{{1,255}}/)?{_FILE.pattern}")
"""In an archive, where all may be in one more folder."""
MAX_FILES = 9
MAX_JSON_BYTES = 2**20
MAX_HEADER_BYTES = 2**24
_BLOCK_BYTES = 2**20
_KEEP_S = 3600.0
"""How long what another process may be working on is left alone."""


class Contents:
    """The folder of all adapters' files. May be used from any thread."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """max_bytes: of one adapter's files together."""
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._incoming, self.kept, self._unsettled = root / "incoming", root / "content", root / "unsettled"
        for folder in (self._incoming, self.kept, self._unsettled):
            folder.mkdir(parents=True, exist_ok=True)
        for left in _old(self._incoming):
            shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def arriving(self) -> Generator["Arrival", None, None]:
        """A place for files to arrive in, which is gone at the end."""
        folder = Path(tempfile.mkdtemp(dir=self._incoming))
        try:
            yield Arrival(folder, self.max_bytes)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, arrival: "Arrival", digest: str) -> None:
        """Files that were found good, by their `Arrival.digest` from now on: one rename. They are held until `release`,
        after which `settle` says whether they stay."""
        with self._lock:
            self.doubt([digest])
            target = self.kept / digest
            if not target.exists():
                try:
                    arrival.folder.rename(target)
                except OSError:
                    if not target.exists():  # else another process has brought the same
                        raise
                _sync(self.kept)
            self._held[digest] += 1

    def release(self, digest: str) -> None:
        """Who brought it has written its version down, or given up."""
        with self._lock:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]

    def is_held(self, digest: str) -> bool:
        """Whether somebody brings it at the moment."""
        return digest in self._held

    def doubt(self, digests: Iterable[str]) -> None:
        """Notes content whose versions are about to change."""
        for digest in digests:
            (self._unsettled / digest).touch()

    def settle(self, digest: str, *, keep: bool) -> None:
        """The versions have changed: removes files that none has any more, and the note. What is held is left alone."""
        with self._lock:
            if digest in self._held:
                return
            if not keep:
                with suppress(FileNotFoundError), tempfile.TemporaryDirectory(dir=self._incoming) as folder:
                    (self.kept / digest).rename(Path(folder) / digest)
            (self._unsettled / digest).unlink(missing_ok=True)

    def unsettled(self) -> list[str]:
        """Content that a process was killed over."""
        return [note.name for note in _old(self._unsettled)]


class Arrival:
    """Files of one adapter as they come."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._left = max_bytes
        self._num_files = 0

    def write(self, name: str, source: IO[bytes]) -> None:
        """Takes a file, or an archive of them. Raises AdapterError for what is no adapter's file, TooLargeError."""
        if archives.is_archive(name):
            self._take_all(archives.members(name, source))
        elif not archives.is_idle(name):
            self._take(name, source)

    def copy(self, folder: Path) -> None:
        """Takes the files of an adapter's folder; what else lies there is left out."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if _FILE.fullmatch(name) and path.is_file():
                with path.open("rb") as file:
                    self._take(name, file)
            elif path.suffix == ".bin" and path.parent == folder:
                raise AdapterError(f"{name} is pickled, which isn't loaded: convert it to safetensors first")

    def check(self) -> dict[str, Any]:
        """Refuses what is too large to be read; returns what `peftkit.json` says."""
        record: object = {}
        for path in sorted(self.folder.rglob("*")):
            if path.suffix == ".json":
                read = _read_json(path)
                record = read if path == self.folder / "peftkit.json" else record
            elif path.suffix == ".safetensors":
                _check_header(path)
        return cast(dict[str, Any], record) if isinstance(record, dict) else {}

    def digest(self) -> tuple[str, int]:
        """SHA-256 over names and contents of the files, which are on the disk from now on, and their bytes."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        digest, num_bytes = hashlib.sha256(), 0
        for path in files:
            name = path.relative_to(self.folder).as_posix()
            with path.open("rb") as file:
                inner = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            digest.update(f"{name}\0{inner}\n".encode())
            num_bytes += path.stat().st_size
        return digest.hexdigest(), num_bytes

    def _take_all(self, members: Iterator[tuple[str, IO[bytes]]]) -> None:
        """Takes an archive's files, out of their folder where they are all in one."""
        staged: dict[str, Path] = {}
        with archives.readable(), tempfile.TemporaryDirectory(dir=self.folder.parent) as staging:
            for name, source in members:
                if archives.is_idle(name):
                    self._receive(source, None)
                    continue
                if not _PACKED.fullmatch(name):
                    raise _not_ours(name)
                if name in staged or len(staged) == MAX_FILES:
                    raise _too_many(name)
                staged[name] = Path(staging) / str(len(staged))
                self._receive(source, staged[name])
            folder = archives.common_folder(staged)
            for name, path in staged.items():
                path.rename(self._place(name.removeprefix(folder)))

    def _take(self, name: str, source: IO[bytes]) -> None:
        self._receive(source, self._place(name))

    def _place(self, name: str) -> Path:
        """Where a file goes. Raises AdapterError for what is no adapter's."""
        if not _FILE.fullmatch(name):
            raise _not_ours(name)
        self._num_files += 1
        target = self.folder / name
        if self._num_files > MAX_FILES or target.exists():
            raise _too_many(name)
        target.parent.mkdir(exist_ok=True)
        return target

    def _receive(self, source: IO[bytes], target: Path | None) -> None:
        """Reads a file to its end, onto the disk where it has a place there. Raises TooLargeError."""
        with nullcontext() if target is None else target.open("xb") as file:
            while block := source.read(_BLOCK_BYTES):
                self._left -= len(block)
                if self._left < 0:
                    raise TooLargeError("the adapter's files are larger than this server takes")
                if file is not None:
                    file.write(block)


def _not_ours(name: str) -> AdapterError:
    return AdapterError(
        f"{name[:80]!r} is no adapter's file: send adapter_config.json, adapter_model.safetensors and, where "
        "there is one, peftkit.json"
    )


def _too_many(name: str) -> AdapterError:
    return AdapterError(f"{name[:80]!r} is given twice, or there are too many files")


def template_of(record: Mapping[str, Any]) -> str | None:
    """The chat template that an adapter brings, by what its `peftkit.json` says."""
    template = record.get("chat_template")
    text = cast(dict[str, Any], template).get("text") if isinstance(template, dict) else None
    return text if isinstance(text, str) and text else None


def _old(folder: Path) -> list[Path]:
    """What lies there since so long that no living process works on it."""
    return [path for path in folder.iterdir() if time.time() - path.stat().st_mtime > _KEEP_S]


def _read_json(path: Path) -> object:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise TooLargeError(f"{path.name} has more than {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path.name} can't be read as JSON ({type(error).__name__})") from error


def _check_header(path: Path) -> None:
    """Bounds what the safetensors library will read into memory before it has seen a tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER_BYTES, path.stat().st_size):
        raise AdapterError(f"{path.name} is no safetensors file, or its header is too long")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
