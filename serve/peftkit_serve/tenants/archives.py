"""The files of a .zip, .tar or .tar.gz, as people pack an adapter: its files, or its folder with what else lies there.

What an archive says of itself can't fill memory, and nothing is unpacked by the archive's own word.
"""

import gzip
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from peftkit.errors import AdapterError

MAX_MEMBERS = 1000
"""Files and folders of one archive."""
MAX_READ_BYTES = 2**21
"""What a header may have."""
_ENDS = (".zip", ".tar", ".tar.gz", ".tgz")
_UNREADABLE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, OSError, RuntimeError, ValueError, LookupError, ArithmeticError),
)
"""What reading an archive raises: OSError by gzip and bz2, RuntimeError for one that is encrypted, or packed in a way
that isn't known; the last three for a damaged name, offset or length."""
_IDLE = re.compile(
    r"__MACOSX/.*|(?:[^/]+/){0,2}"
    r"(?:\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini|\.git(?:attributes|ignore)|"
    r"[^/]*\.md|(?:README|LICEN[CS]E|NOTICE)(?:\.txt)?)",
    re.IGNORECASE,
)


def is_archive(name: str) -> bool:
    """Whether a file of this name is unpacked."""
    return name.lower().endswith(_ENDS)


def is_idle(name: str) -> bool:
    """Whether a file is for people or for a file manager: it changes nothing of an adapter."""
    return _IDLE.fullmatch(name) is not None


def members(name: str, source: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file in an archive, in its order. Raises AdapterError for what can't be read."""
    yield from (_of_zip if name.lower().endswith(".zip") else _of_tar)(source)


@contextmanager
def readable() -> Iterator[None]:
    """Around the reading of an archive's members: raises AdapterError for a damaged one."""
    try:
        yield
    except _UNREADABLE as error:
        if getattr(error, "errno", None) is not None:
            raise  # the disk's fault, not the archive's
        raise AdapterError(f"the archive can't be read ({type(error).__name__})") from error


def common_folder(names: Collection[str]) -> str:
    """The folder that all of these names are in, with its slash; "" where there is none."""
    tops = {name.partition("/")[0] for name in names if "/" in name}
    return f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in names) else ""


def _of_zip(source: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(cast(IO[bytes], _Sparing(source))) as archive:
        for info in _few(archive.infolist()):
            if not info.is_dir():
                with archive.open(info) as member:
                    yield info.filename, member


def _of_tar(source: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    zipped = source.read(2) == b"\x1f\x8b"
    source.seek(0)
    plain = cast(IO[bytes], gzip.GzipFile(fileobj=source, mode="rb")) if zipped else source
    with tarfile.open(fileobj=cast(IO[bytes], _Sparing(plain)), mode="r:") as archive:
        for info in _few(archive):
            member = archive.extractfile(info) if info.isreg() else None
            if member is not None:
                yield info.name.removeprefix("./"), member
            elif not info.isdir():
                raise AdapterError(f"{info.name[:80]!r} in the archive is no plain file")


def _few(infos: Any) -> Iterator[Any]:
    for number, info in enumerate(infos):
        if number == MAX_MEMBERS:
            raise AdapterError(f"the archive has more than {MAX_MEMBERS} files: pack the adapter's own alone")
        yield info


class _Sparing:
    """A file that is read in blocks: what an archive says of a header's length can't fill memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self.seekable, self._read = file.seek, file.tell, file.seekable, file.read

    def read(self, size: int = -1) -> bytes:
        """As a file's. Raises AdapterError for more than blocks are large."""
        if size > MAX_READ_BYTES:
            raise AdapterError("the archive can't be read: a header in it is too long")
        return self._read(size)
