"""Archives as people and their systems make them; what one says of itself can't fill memory."""

import gzip
import io
import random
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit.errors import AdapterError, TooLargeError
from peftkit_serve.tenants.archives import MAX_MEMBERS
from peftkit_serve.tenants.content import Contents

CONFIG, WEIGHTS, RECORD = "adapter_config.json", "adapter_model.safetensors", "peftkit.json"
MAC = ("__MACOSX/my-adapter/._adapter_config.json", "__MACOSX/._my-adapter", "my-adapter/.DS_Store")


def packed(kind: str, names: Iterable[str], content: bytes = b"{}", folders: Iterable[str] = ()) -> io.BytesIO:
    """An archive with files of these names, and entries for folders as `zip -r` makes them."""
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in (*folders, *names):
                archive.writestr(name, b"" if name.endswith("/") else content)
    else:
        with tarfile.open(fileobj=made, mode="w:gz" if kind == "tar.gz" else "w") as archive:
            for name in (*folders, *names):
                info = tarfile.TarInfo(name)
                info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
                info.size = 0 if name.endswith("/") else len(content)
                archive.addfile(info, io.BytesIO(content[: info.size]))
    made.seek(0)
    return made


def taken(tmp_path: Path, name: str, archive: io.BytesIO, max_bytes: int = 2**20) -> list[str]:
    """The files that an archive brings."""
    with Contents(tmp_path, max_bytes=max_bytes).arriving() as arrival:
        arrival.write(name, archive)
        assert not [path for path in arrival.folder.parent.iterdir() if path != arrival.folder], (
            "what was staged is left"
        )
        return sorted(str(path.relative_to(arrival.folder)) for path in arrival.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
@pytest.mark.parametrize(
    ("names", "folders", "expected"),
    [
        ([CONFIG, WEIGHTS], [], [CONFIG, WEIGHTS]),
        ([f"my-adapter/{name}" for name in (CONFIG, WEIGHTS, RECORD)], ["my-adapter/"], [CONFIG, WEIGHTS, RECORD]),
        ([f"My Adapter (1)/{CONFIG}", f"My Adapter (1)/{WEIGHTS}"], [], [CONFIG, WEIGHTS]),
        ([f"my-adapter/{CONFIG}", *MAC, f"my-adapter/{WEIGHTS}"], ["my-adapter/", "__MACOSX/"], [CONFIG, WEIGHTS]),
        (
            ["README.md", "LICENSE", f"a/{CONFIG}", "a/README.md", "a/.gitattributes", f"a/{WEIGHTS}"],
            [],
            [CONFIG, WEIGHTS],
        ),
        (
            [f"a/lora/{CONFIG}", f"a/lora/{WEIGHTS}", f"a/{RECORD}"],
            ["a/", "a/lora/"],
            [f"lora/{CONFIG}", f"lora/{WEIGHTS}", RECORD],
        ),
        ([f"lora/{CONFIG}", f"bottleneck/{CONFIG}"], [], [f"bottleneck/{CONFIG}", f"lora/{CONFIG}"]),
        ([f"lora/{CONFIG}", RECORD], [], [f"lora/{CONFIG}", RECORD]),
    ],
)
def test_a_packed_folder_is_its_files(
    tmp_path: Path, kind: str, names: list[str], folders: list[str], expected: list[str]
) -> None:
    assert taken(tmp_path, f"a.{kind}", packed(kind, names, folders=folders)) == expected


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(
    "names",
    [
        [f"a/{CONFIG}", f"b/{CONFIG}", "b/run.py"],
        [f"my-adapter/{CONFIG}", "my-adapter/training_args.bin"],
        [f"my-adapter/{CONFIG}", "my-adapter/tokenizer.json"],
        [f"My-A/{CONFIG}", f"My-B/{CONFIG}"],
        [f"a/b/c/{CONFIG}"],
        [f"../{CONFIG}"],
        [f"./../{CONFIG}"],
        [f"/etc/{CONFIG}"],
        [f"a/../{CONFIG}"],
        [CONFIG, CONFIG],
        [f"a/{CONFIG}", f"a/{CONFIG}"],
        [f"a{i}/{name}" for i in range(4) for name in (CONFIG, WEIGHTS, RECORD)],
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_anything_else_in_an_archive_is_refused(tmp_path: Path, kind: str, names: list[str]) -> None:
    with pytest.raises(AdapterError):
        taken(tmp_path, f"a.{kind}", packed(kind, names))


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_what_is_left_out_of_an_archive_is_bounded_too(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TooLargeError):
        taken(tmp_path, f"a.{kind}", packed(kind, [CONFIG, "README.md"], bytes(2**20)), max_bytes=2**21 - 1)
    with pytest.raises(AdapterError, match="files"):
        taken(tmp_path, f"a.{kind}", packed(kind, [CONFIG], folders=[f"{i}/" for i in range(MAX_MEMBERS)]))


def test_a_readme_beside_the_files_is_left_out_too(tmp_path: Path) -> None:
    with Contents(tmp_path, max_bytes=2**20).arriving() as arrival:
        arrival.write("README.md", io.BytesIO(b"# Mine"))
        arrival.write(CONFIG, io.BytesIO(b"{}"))
        assert [path.name for path in arrival.folder.iterdir()] == [CONFIG]


def test_a_zip_of_a_folder_is_served(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("my-adapter")
        for path in sorted(adapter_folders["red"].iterdir()):
            archive.write(path, f"my-adapter/{path.name}")
        archive.writestr("my-adapter/README.md", "# Mine")
        for name in MAC:
            archive.writestr(name, b"\0\5\x16\7")
    with serve(make_engine(), store=tmp_path / "store") as served:
        files = {"files": ("my-adapter.zip", made.getvalue())}
        answer = httpx.post(f"{served.url}/v1/adapters", data={"name": "red"}, files=files, timeout=30)
        assert answer.status_code == 201, answer.text
        plain = [("files", (path.name, path.read_bytes())) for path in adapter_folders["red"].iterdir()]
        again = httpx.post(f"{served.url}/v1/adapters", data={"name": "plain"}, files=plain, timeout=30)
        assert (answer.json()["uid"], answer.json()["bytes"]) == (again.json()["uid"], again.json()["bytes"])


def long_header(size: int = 2**26) -> bytes:
    """A small .tar.gz whose first header says that its text is so long, and is."""
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb") as file:
        info = tarfile.TarInfo("././@PaxHeader")
        info.type, info.size = tarfile.XHDTYPE, size
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size // 2**22):
            file.write(bytes(2**22))
    return made.getvalue()


def long_list(num: int = 45_000) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for number in range(num):
            archive.writestr(str(number), b"")
    return made.getvalue()


@pytest.mark.parametrize(("name", "make"), [("a.tar.gz", long_header), ("a.zip", long_list)])
def test_an_archives_headers_cant_fill_memory(tmp_path: Path, name: str, make: Callable[[], bytes]) -> None:
    contents = Contents(tmp_path, max_bytes=2**30)
    made = io.BytesIO(make())
    tracemalloc.start()
    with contents.arriving() as arrival, pytest.raises(AdapterError, match="header in it is too long"):
        arrival.write(name, made)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def damaged_zip(name: str, old: bytes, new: bytes) -> bytes:
    """A zip of one file, with other bytes wherever it has `old`."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"{}")
    assert old in made.getvalue()
    return made.getvalue().replace(old, new)


def tar_of_length(size: int) -> bytes:
    info = tarfile.TarInfo(CONFIG)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(2**14)


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("a.zip", damaged_zip("ä", "ä".encode(), b"\xff\xff")),  # said to be UTF-8
        ("a.zip", damaged_zip("q", b"q", b"\0")),  # no name
        ("a.zip", damaged_zip("qq", b"\x22\0\0\0\0\0", b"\xff\0\0\0\0\0")),  # begins before the file does
        ("a.tar", tar_of_length(-(2**80))),
    ],
)
def test_a_name_or_a_place_in_an_archive_that_cant_be_is_refused(tmp_path: Path, name: str, damaged: bytes) -> None:
    with pytest.raises(AdapterError, match="the archive can't be read"):
        taken(tmp_path, name, io.BytesIO(damaged))


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_damaged_archive_is_an_adapter_or_refused(tmp_path: Path, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    whole = packed(kind, [f"ä/{name}" for name in (CONFIG, WEIGHTS, "README.md")]).getvalue()
    for number in range(300):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(content))
            content[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(1, 4))
        try:
            taken(tmp_path, f"a.{kind}", io.BytesIO(content))
        except AdapterError:
            continue
        except Exception as error:
            raise AssertionError(f"archive {number}: {content.hex()}") from error
