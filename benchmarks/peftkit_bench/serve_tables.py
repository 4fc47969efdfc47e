"""The tables of `peftkit bench serve` beside that of throughput and decode latency: figures with their goals, and where
steps' time goes."""

from collections.abc import Mapping, Sequence
from typing import Any

from peftkit_bench.serve_profile import GROUPS

HEADERS = ("case", "figure", "value", "range", "goal", "met")
PROFILE_HEADERS = ("profile", "step ms", *(name for name, _ in GROUPS), "other", "idle")

Row = list[object]


def rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row a figure: case, figure, value, range, goal and whether it is met."""
    return [[line.get("name", line["case"]), *row] for line in lines for row in _figures(line)]


def profile_rows(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row a step: milliseconds of each group of kernels, and in which none ran."""
    return [
        [
            line["name"].removeprefix("profile "),
            line["step_ms"],
            *(line["groups_ms"].get(group, 0.0) for group in (*(name for name, _ in GROUPS), "other")),
            line["idle_ms"],
        ]
        for line in lines
        if line["case"] == "profile"
    ]


def _figures(line: Mapping[str, Any]) -> list[Row]:
    """Figure, value, range, goal, met."""
    goals, met = line.get("goals", {}), line.get("met", {})
    match line["case"]:
        case "start" if "first_request_ms" in line:
            return [
                ["seconds until ready", line["engine_s"], "", "", ""],
                ["first request, ms", line["first_request_ms"], "", "", ""],
                _spread("later requests, ms", line["later_requests_ms"]),
            ]
        case "capacity" | "replay":
            shown = [["requests/s", line["requests_per_s"], f"{line['low']} … {line['high']}", "", ""]]
            if line["case"] == "replay":
                shown += [[f"first token p{p}, ms", line[f"first_p{p}_ms"], "", "", ""] for p in (50, 99)]
            if "of_first" in line:
                goal = f">= {goals['of_first']}" if goals else ""
                shown.append(["of the fewest adapters'", line["of_first"], "", goal, met.get("of_first", "")])
            return shown
        case "kinds":
            return [
                _spread("LoRA alone, ms a step", line["lora_ms"]),
                _spread("mixed, ms a step", line["mixed_ms"]),
                _spread("mixed / LoRA", line["ratio"], f"<= {goals['ratio']}", met["ratio"]),
            ]
        case "churn":
            return [
                *(
                    _spread(f"{which} churn, p99 between tokens, ms", line[which]["p99_ms"])
                    for which in ("without", "with")
                ),
                _spread("p99 with / without", line["ratio"], f"<= {goals['ratio']}", met["ratio"]),
                *(_spread("a load, ms", one) for one in (line.get("load_ms"),) if one is not None),
            ]
        case "base traffic":
            return [
                _spread(f"{what}, time with / without", one, f"<= {goals[what]}", met[what])
                for what, one in line["time_ratio"].items()
            ]
        case "first token":
            over = line["over_warm_ms"]["host"]
            return [
                *(_spread(f"{place}, ms", line[f"{place}_ms"]) for place in ("warm", "host", "disk")),
                ["host - warm, ms", over, "", f"<= {goals['over_warm_ms']}", met["over_warm_ms"]],
            ]
        case "pages":
            return [["waste", line["waste"], f"{line['min']} … {line['max']}", f"< {goals['waste']}", met["waste"]]]
        case "adapter memory":
            return [["adapters a GiB", line["per_gib"], "", "", ""], ["padding", line["padding"], "", "", ""]]
        case "error":
            return [["error", line["error"], "", "", ""]]
        case "left out":
            return [["left out for lack of time", ", ".join(line["names"]), "", "", ""]]
        case _:
            return []


def _spread(figure: str, one: Mapping[str, Any], goal: str = "", met: object = "") -> Row:
    return [figure, one["median"], f"{one['min']} … {one['max']}", goal, met]
