"""Runs cases: one JSON line each, as soon as it is measured."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from peftkit_bench.kernels import ahead
from peftkit_bench.kernels.case import Case, NotInstalled
from peftkit_bench.provenance import commit, versions
from peftkit_bench.timing import Call, Timing, card, measure_ceilings, time_calls

_PACKAGES = ("peftkit", "torch", "triton", "bitsandbytes", "vllm")
_FEW = 3
"""Cases that are compiled as they come."""

Line = dict[str, Any]


def missing_gpu() -> str | None:
    """What a run lacks on this machine, or None."""
    if not torch.cuda.is_available():
        return f"needs a CUDA GPU, and torch {torch.__version__} finds none: run it on a machine with one"
    try:
        version("triton")
    except PackageNotFoundError:
        return 'needs Triton, which isn\'t installed: pip install "peftkit[gpu]"'
    return None


def chosen(cases: Sequence[Case], only: Sequence[str], quick: bool) -> list[Case]:
    """Cases whose name holds one of `only`; with `quick` the most telling few."""
    named = [case for case in cases if not only or any(text in case.name for text in only)]
    return [case for case in named if case.quick or not quick]


def facts(seed: int) -> Line:
    """What all lines of a run share: card, versions, commit, seed and the ceilings measured now."""
    ceilings = {name: round(value, 3) for name, value in asdict(measure_ceilings()).items()}
    _free()
    return {
        "hardware": card(),
        "versions": versions(_PACKAGES),
        "commit": commit(),
        "seed": seed,
        "ceilings": ceilings,
    }


def measure(cases: Sequence[Case], seed: int, *, with_peers: bool = True) -> Iterator[Line]:
    """Times each case and its peers. A case that fails has a line with its error."""
    if len(cases) > _FEW:
        with ahead.pool() as workers:
            ahead.compile_cases(workers, cases, with_peers=with_peers)
    for case in cases:
        torch.manual_seed(seed)
        yield {"case": case.name, "kernel": case.kernel, "sizes": dict(case.sizes), **_measured(case, with_peers)}
        _free()


def failed(line: Mapping[str, Any]) -> bool:
    """Whether our own kernel raised."""
    return "error" in line


def _measured(case: Case, with_peers: bool) -> Line:
    floor_us = case.floor.us
    line: Line = {"floor_us": round(floor_us, 3), "bytes": case.floor.num_bytes, "flops": case.floor.flops}
    try:
        work = case.prepare()
        timing = time_calls(work.ours, floor_us=floor_us)
    except ahead.FAULTS as error:
        return {**line, "goal": case.goal.text if case.goal else None, "met": None, "error": _first_line(error)}
    times: dict[str, float] = {}
    peers: dict[str, Any] = {}
    for name, make in work.peers.items() if with_peers else ():
        peers[name] = _peer(make, floor_us)
        if isinstance(peers[name], dict) and "median_us" in peers[name]:
            times[name] = peers[name]["median_us"]
    met = None if case.goal is None else case.goal.met(timing.median_us, times)
    return {
        **line,
        **_rounded(timing),
        "fraction": round(floor_us / timing.median_us, 4),
        "peers": peers,
        "goal": case.goal.text if case.goal else None,
        "limit_us": case.goal.limit_us if case.goal else None,
        "met": met,
    }


def _peer(make: Callable[[], Sequence[Call]], floor_us: float) -> Line:
    try:
        return _rounded(time_calls(make(), floor_us=floor_us))
    except NotInstalled as error:
        return {"not_installed": str(error)}
    except ahead.FAULTS as error:
        return {"error": _first_line(error)}
    finally:
        _free()


def _rounded(timing: Timing) -> Line:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(timing).items()}


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def rows(lines: Sequence[Line]) -> list[list[object]]:
    """The table's cells: kernel, sizes, time and spread, floor, fraction, peers, goal, met."""
    table: list[list[object]] = []
    for line in lines:
        sizes = " ".join(f"{key}={value}" for key, value in line["sizes"].items())
        if failed(line):
            table.append(
                [line["kernel"], sizes, None, None, line["floor_us"], None, line["error"][:60], line["goal"], "failed"]
            )
            continue
        peers = ", ".join(f"{name} {_shown(result)}" for name, result in line["peers"].items())
        spread = f"{line['min_us']:.4g}..{line['max_us']:.4g}"
        met = {True: "yes", False: "NO", None: "–"}[line["met"]]
        figures = (line["median_us"], spread, line["floor_us"], line["fraction"])
        table.append([line["kernel"], sizes, *figures, peers, line["goal"], met])
    return table


HEADERS = ("kernel", "sizes", "µs", "spread", "floor", "fraction", "peers µs", "goal", "met")


def _shown(peer: Mapping[str, Any]) -> str:
    if "median_us" in peer:
        return f"{peer['median_us']:.4g}"
    return "not installed" if "not_installed" in peer else "failed"
