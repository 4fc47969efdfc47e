"""`peftkit bench`: what this machine does, beside peers and floors."""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import typer

from peftkit.cli import output
from peftkit.errors import InputError, RunError

Line = dict[str, Any]

app = typer.Typer(help="Benchmarks: one JSON line a case, then a table.")


@app.callback()
def _group() -> None:
    """Benchmarks: one JSON line a case, then a table."""


@app.command()
def kernels(
    out: Path | None = typer.Option(
        None, "--out", help="A file that each JSON line is also written to.", metavar="FILE"
    ),
    only: list[str] | None = typer.Option(
        None,
        "--only",
        help="Cases with this in their name (grouped_lora, rows=64, …); may be repeated.",
        metavar="NAME",
    ),
    quick: bool = typer.Option(False, "--quick", help="The few most telling cases: about a minute."),
    peers: bool = typer.Option(True, "--peers/--no-peers", help="Time cuBLAS, SDPA, bitsandbytes and vLLM too."),
    tune: bool = typer.Option(
        False, "--tune", help="Time each kernel's configurations and print the best of each case."
    ),
    tune_limit: int = typer.Option(48, "--tune-limit", help="Most configurations tried a case.", min=1),
    seed: int = typer.Option(0, "--seed", help="Of the random inputs."),
) -> None:
    """Time every kernel on the shapes of Llama-3.1-8B and Qwen2.5-1.5B, beside its floor, its goal and its peers."""
    from peftkit_bench.kernels import all_cases, run

    if missing := run.missing_gpu():
        raise RunError(f"peftkit bench kernels {missing}")
    cases = run.chosen(all_cases(), only or [], quick)
    if not cases:
        names = ", ".join(sorted({case.kernel for case in all_cases()}))
        raise InputError(
            f"--only {' '.join(only or [])}: no case has that in its name; kernels are {names}", field="only"
        )
    if out is not None and not out.parent.is_dir():
        raise InputError(f"--out {out}: {out.parent} is no folder", field="out")
    facts = run.facts(seed)
    lines: list[dict[str, Any]] = []
    writer = None if out is None else out.open("w", encoding="utf-8")
    try:
        source = _tuned(cases, seed, tune_limit) if tune else run.measure(cases, seed, with_peers=peers)
        with output.progress("bench kernels", total=len(cases), unit="case") as bar:
            for line in source:
                text = json.dumps({**line, **facts}, ensure_ascii=False)
                output.stream(text + "\n")
                if writer is not None:
                    writer.write(text + "\n")
                    writer.flush()
                lines.append(line)
                bar.update(1)
    finally:
        if writer is not None:
            writer.close()
    output.emit(
        {**facts, "cases": lines}, lambda: _tuned_table(lines) if tune else output.table(run.HEADERS, run.rows(lines))
    )
    if any(run.failed(line) for line in lines):
        raise typer.Exit(1)


@app.command()
def serve(
    shape: str | None = typer.Option(
        None,
        "--shape",
        help="8b, 1b or toy: sizes of a Llama with random weights; with --http also the name of a base. "
        "8b where there is a GPU, else toy.",
    ),
    quant: str = typer.Option("none", "--quant", help="none or nf4."),
    only: list[str] | None = typer.Option(
        None,
        "--only",
        help="Cases with this in their name (S3, churn, rows=64, …; --list names them); may be repeated.",
        metavar="NAME",
    ),
    limit: float | None = typer.Option(None, "--limit", help="Seconds after which no further case begins.", min=1),
    profile: bool = typer.Option(
        False, "--profile", help="On a GPU: where the time of decode and prefill steps goes, too."
    ),
    list_: bool = typer.Option(False, "--list", help="Print the cases' names and measure nothing."),
    adapters: str = typer.Option("0,1,8,32,128", "--adapters", help="S1, S2: numbers of LoRAs, with commas."),
    batches: str = typer.Option("1,8,64,256", "--batches", help="S2: sequences of the decode cases, with commas."),
    requests: int = typer.Option(512, "--requests", help="S1: of a throughput case.", min=1),
    max_tokens: int = typer.Option(128, "--max-tokens", help="S1: that each of them generates.", min=1),
    device: str = typer.Option("auto", "--device", help="auto, cuda or cpu."),
    num_pages: int | None = typer.Option(None, "--num-pages", help="KV memory in pages of 16 tokens.", min=1),
    peer: Path | None = typer.Option(
        None, "--peer", help="vLLM's program for S1 and S2, which is run afterwards.", metavar="FILE"
    ),
    http: bool = typer.Option(
        False, "--http", help="Measure the HTTP service instead: its cost over the engine, and tenants' shares."
    ),
    streams: str = typer.Option("16,64,256", "--streams", help="With --http: streams at a time, with commas."),
    seconds: float = typer.Option(
        60.0,
        "--seconds",
        help="Length of each replay (S3) and of churn (S5); with --http of the tenants' cases.",
        min=1,
    ),
    out: Path | None = typer.Option(None, "--out", help="A file that each line is also written to.", metavar="FILE"),
    quick: bool = typer.Option(
        False,
        "--quick",
        help="Base only, 8 and 64 adapters; 256 requests; fewer repeats; replays of 10 seconds. "
        "With --http: shorter answers, 20 seconds.",
    ),
) -> None:
    """Measure the engine with many adapters: throughput (S1) and decode latency (S2) beside vLLM, S-LoRA's replay
    (S3), mixed kinds (S4), churn (S5), cold starts and memory; with --http what the service costs over the engine (S6)
    and whether it is fair (S7)."""
    from peftkit.base import auto_device
    from peftkit_bench import serve as bench
    from peftkit_bench.serve_fleet import sizes_of

    on_gpu = auto_device(device).type == "cuda"
    shape = shape or ("8b" if on_gpu else "toy")
    if shape not in bench.SHAPES and not http:
        raise InputError(f"--shape {shape}: it must be one of {', '.join(bench.SHAPES)}", field="shape")
    if quant not in ("none", "nf4"):
        raise InputError(f"--quant {quant}: it must be none or nf4", field="quant")
    if http:
        for option, given in (("only", only), ("limit", limit), ("profile", profile), ("list", list_)):
            if given:
                raise InputError(f"--{option} is for the engine's cases: leave it or --http out", field=option)
        counts = _counts("--streams", streams, least=1)
        _serve_http(shape, quant, device, num_pages, counts, seconds, quick=quick, out=out)
        return
    if profile and not on_gpu and not list_:
        raise RunError("peftkit bench serve --profile needs a CUDA GPU")
    settings = bench.Settings(
        shape=shape,
        quant=quant,
        requests=min(requests, 256) if quick else requests,
        max_tokens=max_tokens,
        adapters=(0, 8, 64) if quick else _counts("--adapters", adapters, least=0),
        batches=_counts("--batches", batches, least=1),
        repeats=1 if quick else 5,
        device=device,
        num_pages=num_pages,
    )
    sizes = sizes_of(shape, quant, device, num_pages, seconds, quick=quick)
    cases = _serve_cases(settings, sizes, only or [], profiled=profile)
    if list_:
        output.emit({"cases": [case.name for case in cases]}, lambda: "\n".join(case.name for case in cases))
        return
    _serve_engine(cases, settings, sizes, limit, peer=peer, out=out)


def _serve_cases(settings: Any, sizes: Any, only: list[str], *, profiled: bool) -> Any:
    """The chosen cases."""
    from peftkit_bench.serve_cases import all_cases

    known = all_cases(settings, sizes, profiled=profiled)
    cases = [case for case in known if not only or any(text in case.name for text in only)]
    if not cases:
        raise InputError(f"--only {' '.join(only)}: no case has that in its name; --list names them", field="only")
    return cases


def _serve_engine(
    cases: Any, settings: Any, sizes: Any, limit: float | None, *, peer: Path | None, out: Path | None
) -> None:
    """Measures, writes each line as it comes, then the tables."""
    from peftkit_bench import serve as bench
    from peftkit_bench import serve_tables as tables
    from peftkit_bench.serve_cases import measure

    shared = bench.facts(settings)
    lines = _written(measure(cases, settings, sizes, limit), shared, out)
    peers = [] if peer is None else _written(bench.peer_lines(peer, settings), {}, out)
    found = (
        (bench.HEADERS, bench.rows(lines, peers)),
        (tables.HEADERS, tables.rows(lines)),
        (tables.PROFILE_HEADERS, tables.profile_rows(lines)),
    )
    output.emit(
        {**shared, "cases": lines, "peers": peers},
        lambda: "\n\n".join(output.table(headers, cells) for headers, cells in found if cells),
    )
    if any("error" in line for line in lines):
        raise typer.Exit(1)


def _serve_http(
    shape: str, quant: Any, device: str, num_pages: int | None, streams: tuple[int, ...], seconds: float,
    *, quick: bool, out: Path | None,
) -> None:  # fmt: skip
    """Measures the service, writes each line as it comes, then the table."""
    from peftkit_bench import serve_http as bench

    settings = bench.settings_of(shape, quant, device, num_pages, streams, seconds, quick=quick)
    shared = bench.facts(settings)
    lines = _written(bench.measure(settings), shared, out)
    output.emit({**shared, "cases": lines}, lambda: output.table(bench.HEADERS, bench.rows(lines)))


@app.command()
def train(
    only: list[str] | None = typer.Option(
        None, "--only", help="Cases with this in their name (8b nf4, 4x2048, …); may be repeated.", metavar="NAME"
    ),
    levels: str = typer.Option("offload,full,none", "--levels", help="What is recomputed, with commas."),
    quick: bool = typer.Option(False, "--quick", help="The three most telling steps."),
    profile: bool = typer.Option(False, "--profile", help="Say where each step's time goes, by group of kernels."),
    losses: bool = typer.Option(False, "--losses", help="Compare 20 steps of a small base with the reference path."),
    longest: bool = typer.Option(
        False, "--longest", help="Estimate the longest sequence by level and card, and try one."
    ),
    peers: Path | None = typer.Option(
        None, "--peers", help="The peers' program, which is run afterwards.", metavar="FILE"
    ),
    peers_limit: float = typer.Option(300.0, "--peers-limit", help="Seconds for it.", min=1),
    limit: float | None = typer.Option(None, "--limit", help="Seconds after which no further case begins.", min=1),
    seconds: float = typer.Option(8.0, "--seconds", help="Of timed steps a case, three steps at least.", min=0),
    shapes: str | None = typer.Option(
        None, "--shapes", help="Steps of these in place of the usual: small:nf4:lora:2x512, with commas.", hidden=True
    ),
    device: str = typer.Option("auto", "--device", help="auto, cuda or cpu."),
    seed: int = typer.Option(0, "--seed", help="Of the random weights and tokens."),
    out: Path | None = typer.Option(None, "--out", help="A file that each line is also written to.", metavar="FILE"),
) -> None:
    """Time the training step on Llama-3.1-8B's and Qwen2.5-1.5B's sizes, beside HF PEFT, Liger and Unsloth."""
    from peftkit.base.load import auto_device
    from peftkit_bench import train as bench

    wanted = tuple(level.strip() for level in levels.split(","))
    if unknown := [level for level in wanted if level not in bench.LEVELS]:
        raise InputError(f"--levels {unknown[0]}: it must be one of {', '.join(bench.LEVELS)}", field="levels")
    settings = bench.Settings(auto_device(device), seconds, limit, seed, profile)
    known = bench.quick_cases(wanted) if quick else bench.all_cases(wanted)
    if shapes is not None:
        known = bench.named_cases(shapes, wanted)
    cases = [case for case in known if not only or any(text in case.name for text in only)]
    if not cases:
        raise InputError(f"--only {' '.join(only or [])}: no case has that in its name", field="only")
    if peers is not None and not peers.is_file():
        raise InputError(f"--peers {peers}: there is no such file", field="peers")
    _train(settings, cases, losses=losses, longest=longest, peers=peers, peers_limit=peers_limit, out=out)


def _train(
    settings: Any,
    cases: Any,
    *,
    losses: bool,
    longest: bool,
    peers: Path | None,
    peers_limit: float,
    out: Path | None,
) -> None:
    """Measures, writes each line as it comes, then the tables."""
    from peftkit_bench import train as bench
    from peftkit_bench import train_longest
    from peftkit_bench.train_losses import compare
    from peftkit_bench.train_peers import peer_lines

    shared = bench.facts(settings)
    measured = chain(
        bench.measure(cases, settings, shared["dense_tflops"]),
        compare(settings) if losses else (),
        train_longest.longest(settings) if longest else (),
    )
    lines = _written(measured, shared, out)
    theirs = [] if peers is None else _written(peer_lines(peers, cases, limit_s=peers_limit), {}, out)
    tables = (
        (bench.HEADERS, bench.rows(lines, theirs)),
        (bench.PROFILE_HEADERS, bench.profile_rows(lines)),
        (bench.LOSS_HEADERS, bench.loss_rows(lines)),
        (train_longest.HEADERS, train_longest.rows(lines)),
    )
    output.emit(
        {**shared, "cases": lines, "peers": theirs},
        lambda: "\n\n".join(output.table(headers, cells) for headers, cells in tables if cells),
    )
    if any("error" in line for line in lines):
        raise typer.Exit(1)


def _counts(option: str, text: str, *, least: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise InputError(f"{option} {text}: numbers from {least} on are wanted, with commas between", field=option[2:])
    return tuple(int(part) for part in parts)


def _written(found: Iterable[Line], shared: Line, out: Path | None) -> list[Line]:
    """The lines, each of which is written, with what all share, as soon as it is there."""
    lines: list[Line] = []
    for line in found:
        lines.append(line)
        _write_line({**line, **shared}, out)
    return lines


def _write_line(line: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(line, ensure_ascii=False) + "\n"
    output.stream(text)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text)


def _tuned(cases: Any, seed: int, limit: int) -> Any:
    from peftkit_bench.kernels.tune import tune

    return tune(cases, seed, limit)


def _tuned_table(lines: list[dict[str, Any]]) -> str:
    rows = [
        [line["tune"], line["default_us"], best["us"], best["config"]] for line in lines for best in line["best"][:1]
    ]
    return output.table(("case", "default µs", "best µs", "configuration"), rows)
