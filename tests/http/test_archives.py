"""What an archive says of itself can't fill memory: its headers are read in blocks, its files to the disk."""

import gzip
import io
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from peftkit.errors import AdapterError
from peftkit_serve.tenants.content import Contents


def long_header(size: int = 2**26) -> bytes:
    """A small .tar.gz whose first header says that its text is so long, and is."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        info = tarfile.TarInfo("././@PaxHeader")
        info.type, info.size = tarfile.XHDTYPE, size
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size // 2**22):
            file.write(bytes(2**22))
    return packed.getvalue()


def long_list(num: int = 45_000) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(num):
            archive.writestr(str(number), b"")
    return packed.getvalue()


@pytest.mark.parametrize(("name", "make"), [("a.tar.gz", long_header), ("a.zip", long_list)])
def test_an_archives_headers_cant_fill_memory(tmp_path: Path, name: str, make: Callable[[], bytes]) -> None:
    contents = Contents(tmp_path, max_bytes=2**30)
    packed = io.BytesIO(make())
    tracemalloc.start()
    with contents.arriving() as arrival, pytest.raises(AdapterError, match="header in it is too long"):
        arrival.write(name, packed)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
