"""An adapter's files on their way in: bounded, named from a short list, and kept under the hash of their bytes.

    incoming/<random>/     what arrives, and what is being removed
    content/<digest>/      what was found good; never changes
    unsettled/<digest>     a note that it may be under `content/` without a version, or is about to be

A folder appears under `content/` by one rename, after its files are on the disk, and goes by one. A process that is
killed between that and the database's change leaves the note, which the next one looks at.
"""

import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from peftkit.errors import AdapterError, TooLargeError

_FILE = re.compile(r"(?:[a-z][a-z0-9_]{0,31}/)?(adapter_config\.json|adapter_model\.safetensors|peftkit\.json)")
MAX_FILES = 9
MAX_JSON_BYTES = 2**20
MAX_HEADER_BYTES = 2**24
_BLOCK_BYTES = 2**20
_UNREADABLE = (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, RuntimeError)
"""What reading an archive raises: OSError by gzip and bz2, RuntimeError for one that is encrypted, or packed in a way
that isn't known."""
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
        lowered = name.lower()
        if lowered.endswith(".zip"):
            self._take_all(_zip_members(source))
        elif lowered.endswith((".tar", ".tar.gz", ".tgz")):
            self._take_all(_tar_members(source))
        else:
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
        try:
            for name, source in members:
                self._take(name, source)
        except _UNREADABLE as error:
            if getattr(error, "errno", None) is not None:
                raise  # the disk's fault, not the archive's
            raise AdapterError(f"the archive can't be read ({type(error).__name__})") from error

    def _take(self, name: str, source: IO[bytes]) -> None:
        if not _FILE.fullmatch(name):
            raise AdapterError(
                f"{name[:80]!r} is no adapter's file: send adapter_config.json, adapter_model.safetensors and, where "
                "there is one, peftkit.json"
            )
        self._num_files += 1
        target = self.folder / name
        if self._num_files > MAX_FILES or target.exists():
            raise AdapterError(f"{name[:80]!r} is given twice, or there are too many files")
        target.parent.mkdir(exist_ok=True)
        with target.open("xb") as file:
            while block := source.read(_BLOCK_BYTES):
                self._left -= len(block)
                if self._left < 0:
                    raise TooLargeError("the adapter's files are larger than this server takes")
                file.write(block)


def template_of(record: Mapping[str, Any]) -> str | None:
    """The chat template that an adapter brings, by what its `peftkit.json` says."""
    template = record.get("chat_template")
    text = cast(dict[str, Any], template).get("text") if isinstance(template, dict) else None
    return text if isinstance(text, str) and text else None


def _old(folder: Path) -> list[Path]:
    """What lies there since so long that no living process works on it."""
    return [path for path in folder.iterdir() if time.time() - path.stat().st_mtime > _KEEP_S]


class _Sparing:
    """A file that is read in blocks: what an archive says of a header's length can't fill memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self.seekable, self._read = file.seek, file.tell, file.seekable, file.read

    def read(self, size: int = -1) -> bytes:
        """As a file's. Raises AdapterError for more than blocks are large."""
        if size > 2 * _BLOCK_BYTES:
            raise AdapterError("the archive can't be read: a header in it is too long")
        return self._read(size)


def _zip_members(source: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(cast(IO[bytes], _Sparing(source))) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                with archive.open(info) as member:
                    yield info.filename, member


def _tar_members(source: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    zipped = source.read(2) == b"\x1f\x8b"
    source.seek(0)
    plain = cast(IO[bytes], gzip.GzipFile(fileobj=source, mode="rb")) if zipped else source
    with tarfile.open(fileobj=cast(IO[bytes], _Sparing(plain)), mode="r:") as archive:
        for info in archive:
            member = archive.extractfile(info) if info.isreg() else None
            if member is not None:
                yield info.name.removeprefix("./"), member
            elif not info.isdir():
                raise AdapterError(f"{info.name[:80]!r} in the archive is no plain file")


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
