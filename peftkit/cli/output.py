"""What a command may print: one result on stdout, everything else on stderr.

A command does its work and calls `emit` once, at its end, with the result as plain data and the same for a reader::

    from peftkit.cli import output

    output.note("reading data …")                                  # a line on stderr
    with output.progress("train", total=100, unit="step") as bar:   # a bar on a terminal, plain lines elsewhere
        bar.update(1, loss=2.31)
    output.emit({"loss": 2.31, "out": path}, lambda: f"loss 2.31, written to {path}")

With `--json` the result is one JSON object on stdout and stray prints of libraries go to stderr; without it the text
is printed. `stream` writes pieces of a text as they come and is silent under `--json`. Errors are raised, never
printed: `peftkit.cli.main` turns them into a line and an exit code.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_INTERVAL_S = 5.0
"""Least time between two progress lines when stderr is no terminal."""


@dataclass
class State:
    """The flags every command has: one state per process, as stdout is, reset for each command line."""

    json: bool = False
    debug: bool = False
    stdout: TextIO | None = None
    """The real stdout while `--json` keeps library prints off it."""
    emitted: bool = False

    def start_json(self) -> None:
        """Reserves stdout for the one result."""
        if not self.json:
            self.json, self.stdout, sys.stdout = True, sys.stdout, sys.stderr

    def reset(self) -> None:
        """Gives stdout back and forgets the flags."""
        if self.stdout is not None:
            sys.stdout = self.stdout
        self.json = self.debug = self.emitted = False
        self.stdout = None


state = State()


def emit(result: Mapping[str, Any], human: str | Callable[[], str]) -> None:
    """Prints a command's result: `result` as JSON under `--json`, else `human`. Call it once.

    Paths become strings, dataclasses mappings, numbers that are not finite null.
    """
    assert not state.emitted, "a command has one result"
    state.emitted = True
    if state.json:
        text = json.dumps(_plain(result), ensure_ascii=False, allow_nan=False)
    else:
        text = human if isinstance(human, str) else human()
    print(text, file=state.stdout or sys.stdout, flush=True)


def stream(text: str) -> None:
    """Writes a piece of text to stdout at once, without a line end; silent under `--json`."""
    if not state.json:
        sys.stdout.write(text)
        sys.stdout.flush()


def note(text: str) -> None:
    """Writes a line to stderr, above a progress bar if one is shown."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


class Progress:
    """A bar with rate and remaining time when stderr is a terminal, else a line every few seconds."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._done = 0
        self._figures: dict[str, float] = {}
        self._start = self._last_line = time.monotonic()
        self._bar = _bar(description, total, unit) if sys.stderr.isatty() else None

    def update(self, n: int = 1, **figures: float) -> None:
        """Counts `n` units as done; `figures` are shown beside the count (loss=2.31)."""
        self._done += n
        self._figures.update(figures)
        if self._bar is not None:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in self._figures.items()}, refresh=False)
            self._bar.update(n)
        elif time.monotonic() - self._last_line >= LINE_INTERVAL_S:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        rate = self._done / max(self._last_line - self._start, 1e-9)
        of = f"/{self._total}" if self._total is not None else ""
        left = f", {(self._total - self._done) / rate:.0f} s left" if self._total is not None and rate > 0 else ""
        figures = "".join(f", {k} {v:.4g}" for k, v in self._figures.items())
        note(f"{self._description}: {self._done}{of} {self._unit}, {rate:.2f} {self._unit}/s{left}{figures}")

    def close(self) -> None:
        """Removes the bar, or writes the last line."""
        if self._bar is not None:
            self._bar.close()
        elif self._done:
            self._write_line()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def progress(description: str, *, total: int | None = None, unit: str = "it") -> Progress:
    """Starts a progress display on stderr; use it as a context manager or close it."""
    return Progress(description, total, unit)


def _bar(description: str, total: int | None, unit: str) -> "tqdm[Any]":
    from tqdm import tqdm

    return tqdm(desc=description, total=total, unit=unit, file=sys.stderr, leave=False, disable=False)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A text table with columns as wide as their widest cell; numbers are set to the right."""
    body = [[_cell(c) for c in row] for row in rows]
    lines = [list(headers), *body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    numeric = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(headers))]
    out = [
        "  ".join(c.rjust(w) if num else c.ljust(w) for c, w, num in zip(line, widths, numeric, strict=True)).rstrip()
        for line in lines
    ]
    out.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(out)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(cell: str) -> bool:
    return cell == "–" or cell.lstrip("+-").replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1).isdigit()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
