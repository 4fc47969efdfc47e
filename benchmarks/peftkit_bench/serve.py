"""The engine's throughput (S1) and decode latency (S2) over a random base, beside vLLM's of the same session."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from peftkit.base import BaseInfo, Quant
from peftkit_bench.provenance import commit, hardware, versions
from peftkit_bench.serve_inputs import SHAPES, random_adapters, random_tensors, workload, write_base
from peftkit_serve import Engine, Request, SamplingParams

HEADERS = ("case", "adapters", "rows", "figure", "ours", "vLLM", "floor")
_READ_BYTES_PER_S = 4.64e12  # a read-only stream on one H200
_MAX_POSITIONS = 8192
_RANK = 16
_SHORT_S = 10.0
"""A throughput case that takes less is repeated; of a longer one the rates of its parts give an interval."""
_PARTS = 10
_CONTEXT = 128
"""Of the decode cases that vLLM's program has too."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a run measures."""

    shape: str = "8b"
    quant: Quant = "none"
    requests: int = 512
    max_tokens: int = 128
    adapters: Sequence[int] = (0, 1, 8, 32, 128)
    batches: Sequence[int] = (1, 8, 64, 256)
    repeats: int = 5
    """Of each half of a decode case, and of a throughput case that is short."""
    max_requests: int = 256
    max_tokens_per_step: int = 2048
    device: str = "auto"
    deterministic: bool = False
    num_pages: int | None = None


@dataclass(frozen=True)
class _Run:
    """One run: of each step its end, in seconds, and the tokens that it drew."""

    ends: Sequence[tuple[float, int]]

    @property
    def seconds(self) -> float:
        return self.ends[-1][0]

    @property
    def steps(self) -> int:
        return len(self.ends)

    def part_rates(self) -> list[float]:
        """Tokens/s of parts with as many steps each."""
        edges = [round(part * self.steps / _PARTS) for part in range(_PARTS + 1)]
        times = [0.0, *(end for end, _ in self.ends)]
        return [
            sum(number for _, number in self.ends[start:end]) / (times[end] - times[start])
            for start, end in pairwise(edges)
            if end > start
        ]


def _throughput_spread(runs: Sequence[_Run], num_out: int) -> Line:
    """The range of repeats; of a single run an interval of 95 % by the rates of its parts."""
    rates = [num_out / run.seconds for run in runs]
    line: Line = {"min_tok_s": round(min(rates), 1), "max_tok_s": round(max(rates), 1), "repeats": len(rates)}
    parts = runs[0].part_rates()
    if len(runs) == 1 and len(parts) > 1:
        half = 1.96 * statistics.stdev(parts) / len(parts) ** 0.5
        line |= {"low_tok_s": round(rates[0] - half, 1), "high_tok_s": round(rates[0] + half, 1)}
    return line


class Bench:
    """One engine with all adapters of a run in host memory."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        begun = time.perf_counter()
        most = max(settings.adapters)
        with tempfile.TemporaryDirectory() as folder:
            base = BaseInfo(settings.shape, write_base(Path(folder), SHAPES[settings.shape], _MAX_POSITIONS))
            self.engine = Engine(
                base,
                quant=settings.quant,
                device=settings.device,
                max_tokens_per_step=settings.max_tokens_per_step,
                max_requests=settings.max_requests,
                max_adapters=max(1, most),
                num_pages=settings.num_pages,
                adapter_bytes=self._adapter_bytes(max(1, most)),
                deterministic=settings.deterministic,
                prefix_cache=False,  # prompts come again in each repeat; the peer computes them anew too
                source=random_tensors,
            )
        made = time.perf_counter()
        weights = self.engine._runner.memory.weights
        spec, where = self.engine.spec, weights.device.type
        for number, adapter in enumerate(random_adapters(spec, most, _RANK, weights.dtype, where)):
            self.engine.adapters.add_loaded(f"a{number}", adapter)
        self._adapter_size = self.engine.adapters.get("a0").nbytes if most else 0
        self.start: Line = {
            "case": "start",
            "engine_s": round(made - begun, 2),
            "adapters_s": round(time.perf_counter() - made, 2),
            **{name: value for name, value in self.engine.stats().items() if name.endswith(("_bytes", "_total"))},
        }

    def throughput(self, adapters: int, dist: str) -> Line:
        """S1: all requests at once; every adapter and every batch size has been met before."""
        settings = self.settings
        self._warm(adapters)
        work = workload(settings.requests, adapters, dist, self.engine.spec.vocab_size)
        runs = [self._run(work, settings.max_tokens)]
        while runs[0].seconds < _SHORT_S and len(runs) < settings.repeats:
            runs.append(self._run(work, settings.max_tokens))
        seconds = statistics.median(run.seconds for run in runs)
        num_prompt, num_out = sum(len(prompt) for prompt, _ in work), settings.max_tokens * len(work)
        return {
            "case": "throughput",
            "adapters": adapters,
            "dist": dist if adapters else "none",
            "requests": len(work),
            "prompt_tokens": num_prompt,
            "output_tokens": num_out,
            "seconds": round(seconds, 3),
            "steps": runs[0].steps,
            "out_tok_s": round(num_out / seconds, 1),
            **_throughput_spread(runs, num_out),
            "total_tok_s": round((num_prompt + num_out) / seconds, 1),
        }

    def decode(self, adapters: int, batch: int, context: int = _CONTEXT, steps: int = 64) -> Line:
        """S2: what so many more steps cost, with the same prompts; the median of each."""
        vocab = self.engine.spec.vocab_size
        work = [([12 + row % (vocab - 12)] * context, row % adapters if adapters else None) for row in range(batch)]
        self._run(work, steps + 1)
        pairs = [
            tuple(self._run(work, count).seconds for count in (1, steps + 1)) for _ in range(self.settings.repeats)
        ]
        one, many = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        step_s = (many - one) / steps
        each_ms = [1e3 * (pair[1] - pair[0]) / steps for pair in pairs]
        adapter_bytes = min(batch, adapters) * self._adapter_size
        floor_s = step_floor_s(self.engine, batch, context + steps // 2, adapter_bytes)
        return {
            "case": "decode",
            "adapters": adapters,
            "batch": batch,
            "distinct": min(batch, adapters),
            "context": context,
            "step_ms": round(1e3 * step_s, 3),
            "min_ms": round(min(each_ms), 3),
            "max_ms": round(max(each_ms), 3),
            "repeats": len(pairs),
            "tok_s": round(batch / step_s, 1),
            "prefill_ms": round(1e3 * one, 2),
            "floor_ms": round(1e3 * floor_s, 3),
            "of_floor": round(floor_s / step_s, 3),
        }

    def _run(self, work: Sequence[tuple[list[int], int | None]], max_tokens: int) -> "_Run":
        """All requests at once, until all have so many tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        requests = [
            Request(prompt=prompt, adapter=None if n is None else f"a{n}", request_id=str(row), sampling=params)
            for row, (prompt, n) in enumerate(work)
        ]
        begun, steps = time.perf_counter(), list[tuple[float, int]]()
        for request in requests:
            self.engine.add_request(request)
        while self.engine.has_work():
            outputs = self.engine.step()
            assert all(output.finish_reason in (None, "length") for output in outputs)
            steps.append((time.perf_counter() - begun, len(outputs)))
        assert sum(number for _, number in steps) == max_tokens * len(work)
        self.engine.check_integrity()
        return _Run(steps)

    def _warm(self, adapters: int) -> None:
        self._run([([11] * 16, n) for n in range(adapters)] or [([11] * 16, None)], 2)

    def _adapter_bytes(self, count: int) -> int:
        shape = SHAPES[self.settings.shape]
        wide = shape.num_attention_heads * shape.head_dim + 2 * shape.num_key_value_heads * shape.head_dim
        sides = 2 * wide + 3 * (shape.hidden_size + shape.intermediate_size) + 4 * shape.hidden_size
        return count * shape.num_hidden_layers * (_RANK * sides * 4 + (64 << 10))


def step_floor_s(engine: Engine, rows: int, context: int, adapter_bytes: int) -> float:
    """What a decode step takes at least: it reads the weights but for the input embedding, so many rows' keys and
    values, and each adapter once."""
    runner, spec = engine._runner, engine.spec
    dtype = runner.memory.weights.dtype
    kv_bytes = rows * context * spec.kv_bytes_per_token(dtype)
    embedding_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize
    return (runner.weight_bytes - embedding_bytes + kv_bytes + adapter_bytes) / _READ_BYTES_PER_S


def peer_lines(program: Path, settings: Settings) -> Iterator[Line]:
    """The lines of vLLM's program over the same requests, in a process of its own."""
    engines = ",".join("base" if count == 0 else str(count) for count in settings.adapters)
    argv = [sys.executable, str(program), "--engines", engines, "--shape", settings.shape]
    argv += ["--requests", str(settings.requests), "--out-len", str(settings.max_tokens)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def facts(settings: Settings) -> Line:
    """What all lines of a run share."""
    return {
        "hardware": hardware(settings.device),
        "versions": versions(("peftkit", "torch", "triton", "transformers")),
        "commit": commit(),
        "seed": 0,
        "shape": settings.shape,
        "quant": settings.quant,
    }


def rows(lines: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """The table: our figure, the peer's of the same case, the floor."""
    figure = {"throughput": "out_tok_s", "decode": "step_ms"}

    def key(line: Mapping[str, Any]) -> tuple[object, ...]:
        return line["case"], line.get("adapters"), line.get("batch"), line.get("dist"), line.get("context", _CONTEXT)

    theirs = {key(line): line for line in peers if line.get("case") in figure}
    return [
        [
            _named(line),
            line["adapters"],
            line.get("batch", line.get("requests")),
            figure[line["case"]],
            line[figure[line["case"]]],
            theirs.get(key(line), {}).get(figure[line["case"]], ""),
            line.get("floor_ms", ""),
        ]
        for line in lines
        if line["case"] in figure
    ]


def _named(line: Mapping[str, Any]) -> str:
    """A case with what else tells it from the others of its kind."""
    context = line.get("context", _CONTEXT)
    return f"{line['case']} {line.get('dist', '')}".strip() + ("" if context == _CONTEXT else f" at {context}")
