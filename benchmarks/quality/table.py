"""The table of a results file, as README has it, and which methods reach HF PEFT.

    python benchmarks/quality/table.py results.jsonl

A cell is peftkit / HF PEFT, each the mean over the seeds of all test rows at the learning rate that was best on the
validation rows. A method reaches its peer when its mean is at least the peer's less one standard error; that is taken
over the rows and over the seeds together.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks import OUR_METHODS, TASKS, VARIANTS

Key = tuple[str, str, str]
"""Library, method, task."""


def better(metric: str, a: float, b: float) -> bool:
    """Whether score `a` is better than `b`."""
    return a < b if metric == "nll" else a > b


def best_trials(results: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """The trial with the best first metric on the validation rows, of each library, method and task."""
    best: dict[Key, dict[str, Any]] = {}
    for result in results:
        if "error" in result or result["split"] != "valid":
            continue
        key, metric = _key(result), TASKS[result["task"]].metrics[0]
        if key not in best or better(metric, result["scores"][metric][0], best[key]["scores"][metric][0]):
            best[key] = result
    return best


def means(results: list[dict[str, Any]]) -> dict[Key, tuple[float, float]]:
    """Mean over the seeds and its standard error, of the first metric on the test rows."""
    best = best_trials(results)
    runs: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        key = _key(result)
        if "error" not in result and result["split"] == "test" and result["lr"] == best[key]["lr"]:
            runs[key].append(tuple(result["scores"][TASKS[result["task"]].metrics[0]]))
    return {key: _mean(scores) for key, scores in runs.items()}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; a cell whose method doesn't reach its peer ends with an asterisk."""
    found = means(results)
    metrics = [f"{task}, {settings.metrics[0]}" for task, settings in TASKS.items()]
    lines = ["| | " + " | ".join(metrics) + " |", "| --- " * (len(metrics) + 1) + "|"]
    for method in (*OUR_METHODS, *VARIANTS):
        if any(("peftkit", method, task) in found for task in TASKS):
            lines.append(f"| {method} | " + " | ".join(_cell(found, method, task) for task in TASKS) + " |")
    return "\n".join(lines)


def _cell(found: dict[Key, tuple[float, float]], method: str, task: str) -> str:
    ours = found.get(("peftkit", method, task))
    if ours is None:
        return "–"
    peer = found.get(("peft", VARIANTS[method][0] if method in VARIANTS else method, task))
    if peer is None:
        return f"{ours[0]:.3f}"
    reached = not better(TASKS[task].metrics[0], peer[0] - peer[1], ours[0])
    return f"{ours[0]:.3f} / {peer[0]:.3f} ± {peer[1]:.3f}" + ("" if reached else " *")


def _mean(scores: list[tuple[float, float]]) -> tuple[float, float]:
    values, errors = zip(*scores, strict=True)
    over_seeds = statistics.variance(values) / len(values) if len(values) > 1 else 0.0
    return statistics.mean(values), (statistics.mean(errors) ** 2 + over_seeds) ** 0.5


def _key(result: dict[str, Any]) -> Key:
    return result["library"], result["method"], result["task"]


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]))
