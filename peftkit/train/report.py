"""One self-contained HTML page that shows a run, or compares several: figures, curves, samples, recipe, environment.

Nothing is loaded from elsewhere: curves are inline SVG, and everything that comes from a run is escaped.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from peftkit.errors import InputError
from peftkit.train.folder import METRICS, REPORT, RUN, disk_errors

_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#9c36b5", "#e8a500", "#0b7285", "#c2255c", "#5c5f66")
_WIDTH, _HEIGHT, _MARGIN = 560, 240, 48
_CURVES = (
    ("train", "loss", "training loss"),
    ("eval", "loss", "evaluation loss"),
    *(("eval", metric, f"evaluation {metric}") for metric in ("exact_match", "accuracy", "rouge_l")),
    ("train", "lr", "learning rate"),
    ("train", "grad_norm", "gradient norm"),
    ("train", "tokens_per_s", "tokens a second"),
    ("train", "mfu", "share of the GPU's arithmetic"),
    ("train", "memory_gb", "peak memory, GB"),
)
_FIGURES = (
    "steps",
    "total_steps",
    "train_loss",
    "best_loss",
    "best_step",
    "metric",
    "best_score",
    "trainable_parameters",
    "tokens",
    "seconds",
    "tokens_per_s",
    "padding",
    "fast_share",
    "peak_memory_bytes",
    "skipped_steps",
    "uid",
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem; color: #1f2328 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto } td, th { border: 1px solid #d0d7de;
padding: .3rem .6rem; text-align: left; vertical-align: top } td.number { text-align: right }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 } .curves { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600 } svg { max-width: 100%; height: auto }
.differs { background: #fff8c5 }
"""


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    name: str
    content: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of a finished run; empty before."""
        return self.content.get("summary") or {}

    def points(self, event: str, figure: str) -> list[tuple[float, float]]:
        """(step, value) of each line that has the figure."""
        return [
            (line["step"], line[figure])
            for line in self.lines
            if line["event"] == event and isinstance(value := line.get(figure), (int, float)) and math.isfinite(value)
        ]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Reads a run's record and metrics. Raises InputError for a folder that holds none, or a damaged one."""
    try:
        content = json.loads((folder / RUN).read_bytes())
        metrics = folder / METRICS
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        # a run that is being written may end in the middle of a line
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{folder} holds no run: there is no {RUN} in it; name a recipe's out folder") from error
    except OSError as error:
        raise InputError(f"{folder}: can't read the run: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{folder}: the run's record is damaged: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(line, dict) and {"event", "step"} <= set(line) for line in lines
    ):
        raise InputError(f"{folder}: the run's record is damaged: it isn't what peftkit train writes")
    return Run(name or str(folder), content, lines)


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Writes the page of some runs, compared where they are several. Raises InputError, RunError."""
    if path.is_dir():
        raise InputError(f"--out: {path} is a folder: name the page, as in {path / REPORT}", field="out")
    runs = [read_run(folder) for folder in folders]
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(runs), encoding="utf-8")


def page(runs: Sequence[Run]) -> str:
    """The page as HTML."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        _table("Figures", runs, _figures),
        "<h2>Curves</h2><div class='curves'>",
        *(_curve(runs, *curve) for curve in _CURVES),
        "</div>",
        *(_samples(run) for run in runs),
        _table("Recipe", runs, lambda run: _flat(run.content.get("recipe") or {})),
        _table("Data", runs, lambda run: _flat(run.content.get("data") or {})),
        _table("Environment", runs, _environment),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _figures(run: Run) -> dict[str, Any]:
    return {"status": run.content.get("status"), **{name: run.summary.get(name) for name in _FIGURES}}


def _environment(run: Run) -> dict[str, Any]:
    base = run.content.get("base") or {}
    names = {"base": base.get("id"), "quant": run.content.get("quant")}
    return {**names, **_flat(run.content.get("machine") or {}), **_flat(run.content.get("versions") or {})}


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat


def _table(title: str, runs: Sequence[Run], facts: Callable[[Run], Mapping[str, Any]]) -> str:
    """A row for each fact, a column for each run; rows in which runs differ are marked."""
    columns = [facts(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = []
    for name in names:
        values = [column.get(name) for column in columns]
        differs = " class='differs'" if any(value != values[0] for value in values) else ""
        rows.append(f"<tr{differs}><th>{escape(name)}</th>{''.join(map(_cell, values))}</tr>")
    return f"<h2>{title}</h2><table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"<td>{escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}</td>"
    return f"<td class='number'>{value:,}</td>" if isinstance(value, int) else f"<td class='number'>{value:.5g}</td>"


def _samples(run: Run) -> str:
    samples = run.content.get("samples") or []
    if not samples:
        return ""
    columns = ("where", "prompt", "reference", "before", "after")
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td><pre>{escape(str(sample.get(name) or ''))}</pre></td>" for name in columns) + "</tr>"
        for sample in samples
    )
    return f"<h2>Samples before and after: {escape(run.name)}</h2><table><tr>{head}</tr>{rows}</table>"


def _curve(runs: Sequence[Run], event: str, figure: str, title: str) -> str:
    """A figure over steps as inline SVG, a line for each run; nothing where no run has it."""
    lines = {index: points for index, run in enumerate(runs) if (points := run.points(event, figure))}
    if not lines:
        return ""
    steps = [step for points in lines.values() for step, _ in points]
    values = [value for points in lines.values() for _, value in points]
    left, right, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: float, value: float) -> tuple[float, float]:
        x = _MARGIN + (step - left) / ((right - left) or 1) * (_WIDTH - 2 * _MARGIN)
        y = _HEIGHT - _MARGIN - (value - low) / ((high - low) or 1) * (_HEIGHT - 2 * _MARGIN)
        return x, y

    drawn = []
    for index, points in lines.items():
        colour, name = _COLOURS[index % len(_COLOURS)], escape(runs[index].name)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{colour}'><title>{name}</title></polyline>")
        x, y = place(*points[-1])
        drawn.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{colour}'/>")
        if len(runs) > 1:
            drawn.append(f"<text x='{_MARGIN}' y='{14 + 13 * index}' fill='{colour}'>{name}</text>")
    bottom, top = _HEIGHT - _MARGIN, _MARGIN
    axes = (
        f"<path d='M{_MARGIN} {top}V{bottom}H{_WIDTH - _MARGIN}' fill='none' stroke='#8c959f'/>"
        f"<text x='4' y='{bottom}'>{low:.4g}</text><text x='4' y='{top + 4}'>{high:.4g}</text>"
        f"<text x='{_MARGIN}' y='{bottom + 16}'>{left}</text>"
        f"<text x='{_WIDTH - _MARGIN}' y='{bottom + 16}' text-anchor='end'>step {right}</text>"
    )
    svg = (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' font-size='11' role='img'>{axes}{''.join(drawn)}</svg>"
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
