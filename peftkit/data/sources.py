"""Where rows come from: files and `datasets` folders, read as mappings in their own order.

    FILE.jsonl, .ndjson    one object a line; so is any other ending
    FILE.json              a list of objects, or one object a line
    FILE.csv, .tsv         a header and records; every value is text
    FILE.parquet           columns
    FILE.txt               one text, as a row {"text": …}
    FOLDER[#SPLIT]         what `datasets` writes with save_to_disk
    OWNER/NAME[:CONFIG][#SPLIT]   a data set of the hub, split "train" unless named

Each error names the source and the row. Nothing here uses the network but a hub id that isn't in the cache.
"""

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from peftkit import resources
from peftkit.base.hub import out_of_reach
from peftkit.errors import DataError, InputError, did_you_mean

Located = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and its fields."""
_READ_BYTES = 2**20
_MAX_FIELD = 2**31 - 1
_OTHER_KINDS = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".xlsx", ".xls", ".arrow", ".pkl", ".db")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again, from the start or from any row."""

    name: str
    """As a user wrote it."""
    read: Callable[[int], Iterator[Located]]
    """Rows from an index on, counted from 0 over rows that hold something."""
    digest: Callable[[bool], str]
    """Hex SHA-256 of the content; given True of the size and both ends of each file, for what is too large to read."""


def open_source(name: str | Path, *, streaming: bool = False, shown: str | None = None) -> Source:
    """The source that a user means by `name`, `shown` in messages as.

    `streaming` takes a hub data set row by row instead of whole. Raises DataError where there is no such source.
    """
    typed = shown or str(name)
    location, _, split = str(name).partition("#")
    try:
        path = resources.find(location)
    except DataError:
        raise
    except InputError as error:
        raise DataError(f"{_printable(typed)}: {error}") from error
    if path.is_dir():
        return _table(typed, _load_folder(path, split, typed), [path])
    if not path.exists() and not path.suffix[1:].isalpha() and _HUB_ID.fullmatch(location):
        return _table(typed, _load_hub(location, split or "train", typed, streaming), [])
    if split and not path.exists() and resources.find(str(name)).exists():
        path = resources.find(str(name))  # a file whose name has a '#'
    elif split:
        raise DataError(f"{typed}: a file has no splits: leave out '#{split}'")
    if not path.exists():
        raise DataError(_no_such_file(path, typed))
    if path.suffix.lower() in _OTHER_KINDS:
        raise DataError(f"{typed}: {path.suffix} files aren't read: unpack it, or write it as JSONL, CSV or Parquet")
    read = _READERS.get(path.suffix.lower(), _jsonl)

    def rows(start: int) -> Iterator[Located]:
        try:
            yield from read(path, typed, start)
        except OSError as error:
            raise DataError(f"{typed}: can't read the data file: {error.strerror or error}") from error

    return Source(typed, rows, lambda ends: _digest([path], typed, ends=ends))


def _no_such_file(path: Path, typed: str) -> str:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, beside, likeness=0.75)
    kinds = ": name a file, a folder of `datasets`, a hub id OWNER/NAME, or example:SET/FILE.jsonl"
    return f"{typed}: there is no such data file{near or kinds}"


def _digest(paths: list[Path], name: str, *, ends: bool) -> str:
    digest = hashlib.sha256()
    try:
        for path in paths:
            size = path.stat().st_size
            with path.open("rb") as file:
                if ends and size > 2 * _READ_BYTES:
                    digest.update(f"{size}\0".encode() + file.read(_READ_BYTES))
                    file.seek(size - _READ_BYTES)
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise DataError(f"{name}: can't read the data file: {error.strerror or error}") from error
    return digest.hexdigest()


# files ---------------------------------------------------------------------------------------------------------------


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines that hold something."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{name}:{number}: not UTF-8 text: {error.reason}") from error
            if line.strip():
                yield number, line


def _jsonl(path: Path, name: str, start: int) -> Iterator[Located]:
    for number, line in islice(_lines(path, name), start, None):
        where = f"{name}:{number}"
        try:
            value = _parse(line.rstrip("\r\n"), where)
        except DataError as error:
            if path.suffix.lower() in (*_READERS, ".jsonl", ".ndjson"):
                raise
            raise DataError(f"{error} (an ending '{path.suffix}' is read as one JSON object a line)") from error
        yield where, _fields(value, where)


def _json(path: Path, name: str, start: int) -> Iterator[Located]:
    with path.open("rb") as file:
        beginning = file.read(_READ_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if beginning[:1] != b"[":
        if re.match(rb"\{\s*(\n|\"[^\"]*\"\s*:\s*\[\s*(\n|\{\s*\n))", beginning):
            raise DataError(
                f"{name}: one JSON object over many lines: rows are a list of objects, or one object a line; where the "
                "rows are a list inside it, write that list alone"
            )
        yield from _jsonl(path, name, start)
        return
    rows = _parse("".join(line for _, line in _lines(path, name)), name)
    for number, row in enumerate(rows[start:], start=start + 1):
        where = f"{name}: row {number}"
        yield where, _fields(row, where)


def _parse(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{where}: broken JSON at {place}: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON nested too deep") from error
    except ValueError as error:  # Python reads no whole number of more than 4300 digits
        raise DataError(f"{where}: a number has too many digits: write it as text, in quotes") from error
    if _ESCAPED_SURROGATE.search(text):
        _check_characters(value, where)
    return value


def _fields(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row is a JSON object, not {kind_of(row)}")
    return row


def _check_characters(value: Any, where: str, field: str = "") -> None:
    """Raises DataError where a text holds half of a surrogate pair."""
    if isinstance(value, str) and (found := _SURROGATE.search(value)):
        raise DataError(
            f"{where}: {field or 'the row'} holds half of a surrogate pair, \\u{ord(found[0]):04x} at character "
            f"{found.start() + 1}, which is no character: write both halves or leave it out"
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(key, str):
            _check_characters(key, where, "a field's name")
            _check_characters(item, where, f"{field}.{key}" if field else key)
        else:
            _check_characters(item, where, f"{field}[{key}]")


def _csv(path: Path, name: str, start: int) -> Iterator[Located]:
    csv.field_size_limit(_MAX_FIELD)  # the module's own 128 KiB is less than a document
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            records = (record for record in reader if record)
            header = next(records, [])
            if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
                raise DataError(
                    f"{name}:1: the header is one name, {header[0]!r}: write commas where it has {other!r}"
                    + (", or call the file .tsv" if other == "\t" else "")
                )
            if doubled := next((column for column in header if header.count(column) > 1), None):
                raise DataError(f"{name}:1: the header names '{doubled}' twice")
            for record in islice(records, start, None):
                where = f"{name}:{reader.line_num}"
                if len(record) != len(header):
                    raise DataError(f"{where}: the record has {len(record)} values, the header {len(header)} names")
                yield where, dict(zip(header, record, strict=True))
        except csv.Error as error:
            raise DataError(f"{name}:{reader.line_num}: not valid CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{reader.line_num + 1}: not UTF-8 text: {error.reason}") from error


def _parquet(path: Path, name: str, start: int) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            first, skipped = 0, 0
            while first < file.num_row_groups and skipped + file.metadata.row_group(first).num_rows <= start:
                skipped += file.metadata.row_group(first).num_rows
                first += 1
            batches = file.iter_batches(batch_size=256, row_groups=range(first, file.num_row_groups))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(islice(rows, start - skipped, None), start=start + 1):
                yield f"{name}: row {number}", _without_nulls(row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not a Parquet file that can be read: {error}") from error


def _txt(path: Path, name: str, start: int) -> Iterator[Located]:
    text = "".join(line for _, line in _all_lines(path, name))
    if text.strip() and not start:
        yield name, {"text": text}


def _all_lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    try:
        yield 1, path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from error


_READERS: dict[str, Callable[[Path, str, int], Iterator[Located]]] = {
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".txt": _txt,
}


# datasets ------------------------------------------------------------------------------------------------------------


def _table(name: str, table: Any, folders: list[Path]) -> Source:
    """A table of `datasets`, whole or streamed."""

    def rows(start: int) -> Iterator[Located]:
        if start >= getattr(table, "num_rows", start + 1):  # a table can't skip all it has
            return
        part = table.skip(start) if start else table
        for number, row in enumerate(part, start=start + 1):
            yield f"{name}: row {number}", _without_nulls(row)

    def digest(ends: bool) -> str:
        files = sorted(Path(file["filename"]) for file in getattr(table, "cache_files", []))
        if files and folders:
            return _digest(files, name, ends=ends)
        made_of = getattr(table, "_fingerprint", None) or f"{name} {table.info.version} {table.info.download_checksums}"
        return hashlib.sha256(made_of.encode()).hexdigest()

    return Source(name, rows, digest)


def _without_nulls(value: Any) -> Any:
    """Without fields that are null: a column of objects has every field of any row, null where this row has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _load_folder(path: Path, split: str, name: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        table = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        raise DataError(
            f"{name}: a folder that `datasets` didn't write with save_to_disk: name a file in it, or mend it "
            f"({_one_line(error)})"
        ) from error
    if not isinstance(table, datasets.DatasetDict):
        if split:
            raise DataError(f"{name}: the folder holds one table and no splits: leave out '#{split}'")
        return table
    if not split and len(table) == 1:
        return next(iter(table.values()))
    if split not in table:
        names = [str(known) for known in table]
        wrong = f"no split '{split}'{did_you_mean(split, names)}" if split else "which split is meant isn't said"
        raise DataError(f"{name}: {wrong}: write {path}#{names[0]} (there are: {', '.join(names)})")
    return table[split]


def _load_hub(location: str, split: str, name: str, streaming: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    identity, _, config = location.partition(":")
    reason = out_of_reach()
    try:
        with _from_cache(reason is not None):
            return datasets.load_dataset(identity, config or None, split=split, streaming=streaming)
    except (OSError, ValueError, DatasetsError) as error:
        fault = f"can't be had: {_one_line(error)}"
        if reason:
            fault = (
                f"isn't in the cache, and the hub can't be reached ({reason}): name a local file, or load it once with "
                "`datasets` where the hub can be reached"
            )
        raise DataError(
            f"{name}: there is no such file, and the hub's data set {identity} (split {split}) {fault}"
        ) from error


@contextmanager
def _from_cache(only: bool) -> Iterator[None]:
    """Inside, `datasets` doesn't ask the hub: it would, for half a minute, before it looks into its cache."""
    from datasets import config

    offline = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = offline or only
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = offline


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:199] + "…"


def _printable(text: str) -> str:
    return text.encode("unicode_escape").decode() if not text.isprintable() else text


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    if value == []:
        return "an empty list"
    return names.get(type(value), "a number")
