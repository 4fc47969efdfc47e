"""What the HTTP service costs over its engine (S6), and whether tenants get their share and no more (S7).

    this process ──plans──▶ client processes ──POST /v1/completions, keys, streams──▶ server ──▶ engine's process
         └───────────────── the same work for the engine alone (stdin, stdout) ─────────▲

Both ways go through one engine in a process of its own, in turn, so that what else the machine does meets both: through
HTTP, or asked by the server's event loop itself.
"""

import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from peftkit.base import Quant, auto_device
from peftkit.errors import RunError
from peftkit_bench.provenance import commit, hardware, versions
from peftkit_bench.serve_http_figures import (
    FULL_AFTER,
    Line,
    Wave,
    cost,
    fairness,
    latencies,
    least_waiting,
    served,
    spread,
    wave,
)

HEADERS = ("case", "figure", "value", "range", "goal", "met")
MODEL = "base"
_PRICES = (1.0, 2.0)
"""Of a prompt's and of a generated token, as the service's own fair share counts them."""
_FIRST, _SECOND = "first", "second"
_RATES = {_FIRST: 0.75, _SECOND: 1.5}
_CALM_RATE = 0.05
_FEWEST_CALM = 8
"""Requests of the tenant that sends little, on a slow engine."""
_SHORT_S = 10.0
_REPEATS = 5


@dataclass(frozen=True)
class Settings:
    """What a run measures."""

    shape: str
    quant: Quant = "none"
    device: str = "auto"
    streams: Sequence[int] = (16, 64, 256)
    prompt_tokens: int = 128
    output_tokens: int = 128
    tenant_tokens: int = 256
    """Of a prompt, and of its answer, in S7."""
    seconds: float = 60.0
    """Of S7's runs."""
    max_requests: int = 256
    max_tokens_per_step: int = 2048
    num_pages: int | None = None
    seed: int = 0

    def plain(self) -> Line:
        """What the server's process is told."""
        longest = max(self.prompt_tokens + self.output_tokens, 2 * self.tenant_tokens)
        return {
            "shape": self.shape,
            "quant": self.quant,
            "device": self.device,
            "max_requests": self.max_requests,
            "max_tokens_per_step": self.max_tokens_per_step,
            "num_pages": self.num_pages,
            "max_positions": 2 * longest,
            "tenants": [_FIRST, _SECOND],
        }


def settings_of(
    shape: str, quant: Quant, device: str, num_pages: int | None, streams: Sequence[int], seconds: float, *, quick: bool
) -> Settings:
    """What the command's options mean: on a CPU everything is smaller, and KV memory is what the cases need."""
    on_gpu, places = auto_device(device).type == "cuda", max(streams)
    tenant_tokens = (128 if quick else 256) if on_gpu else 32
    prompt_tokens, output_tokens = (64, 128) if on_gpu and quick else (128, 256) if on_gpu else (16, 64)
    if num_pages is None and not on_gpu:
        num_pages = places * (2 + max(prompt_tokens + output_tokens, 2 * tenant_tokens) // 16)
    return Settings(
        shape=shape, quant=quant, device=device, streams=sorted(streams), prompt_tokens=prompt_tokens,
        output_tokens=output_tokens, tenant_tokens=tenant_tokens, seconds=min(seconds, 20.0) if quick else seconds,
        max_requests=places, max_tokens_per_step=2048 if on_gpu else max(512, places), num_pages=num_pages,
    )  # fmt: skip


def facts(settings: Settings) -> Line:
    """What all lines of a run share."""
    packages = ("peftkit", "torch", "triton", "transformers", "fastapi", "uvicorn", "httptools", "uvloop")
    return {
        "hardware": hardware(settings.device),
        "versions": versions(packages),
        "commit": commit(),
        "seed": settings.seed,
        "shape": settings.shape,
        "quant": settings.quant,
    }


class Server:
    """The server's process, as a context manager, and the clients'."""

    def __init__(self, settings: Settings) -> None:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            # by its name, not as a script: the engine's process finds there what it is to make
            [sys.executable, "-c", "from peftkit_bench.serve_http_server import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self.started = self._ask(settings.plain())
        self._keys: Mapping[str, str] = self.started["keys"]
        self._address = urlsplit(self.started["url"])
        self._num_clients = max(1, min(4, (os.cpu_count() or 1) // 4))

    def alone(self, requests: Sequence[Line], streams: int) -> Wave:
        """Streams through the engine's process alone."""
        before = self._ask({})
        result = self._ask({"requests": requests, "streams": streams})
        return wave(result, result["loop_cpu_s"], self._ask({})["engine"] - before["engine"])

    def http(self, requests: Sequence[Line], streams: int) -> Wave:
        """The same through the service."""
        before = self._ask({})
        result = self._clients(requests, {"streams": streams})
        after = self._ask({})
        return wave(result, after["loop"] - before["loop"], after["engine"] - before["engine"])

    def arrivals(self, requests: Sequence[Line], until: float) -> Line:
        """Requests at their times, cut off after `until` seconds."""
        return self._clients(requests, {"until": until})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _clients(self, requests: Sequence[Line], how: Line) -> Line:
        """Requests dealt out to the clients' processes; their times together."""
        count = min(self._num_clients, how.get("streams", self._num_clients))
        start = time.perf_counter() + 0.3 + 2e-4 * len(requests)
        plans: list[str] = []
        for number in range(count):
            mine = [{**one, "key": self._keys[one["tenant"]]} for one in requests[number::count]]
            plan = {"host": self._address.hostname, "port": self._address.port, "model": MODEL, "start": start, **how}
            if "streams" in how:
                plan["streams"] = len(range(number, how["streams"], count))
            plans.append(json.dumps({**plan, "requests": mine}))
        with ThreadPoolExecutor(count) as threads:
            parts = list(threads.map(_client, plans))
        return {
            "begun": min(part["begun"] for part in parts),
            "ended": max(part["ended"] for part in parts),
            "cpu_share": max(part["cpu_share"] for part in parts),
            "times": [one for part in parts for one in part["times"]],
        }

    def _ask(self, what: Line) -> Line:
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise RunError(f"the server that is measured has ended: {self._log.read()[-2000:]}")
        return json.loads(answer)


def measure(settings: Settings) -> Iterator[Line]:
    """The run's lines, as they are measured."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the clients' too: a connection is a file
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with Server(settings) as server:
        started = server.started
        yield {"case": "start", **{name: round(started[name], 2) for name in ("engine_s", "start_s", "pages")}}
        per_token_s = 0.0
        for streams in settings.streams:
            line, steady_s = _service(server, settings, streams)
            per_token_s = per_token_s or steady_s / streams
            for who in ("engine", "http"):
                p99_s = 1e-3 * line[who]["steady_p99_ms"]["median"]
                line[f"{who}_p99_of_first"] = round(p99_s / (streams * per_token_s), 3)
            yield line | _judged(line)
        capacity = _capacity(server, settings)
        yield {"case": "capacity", "tenant_tokens": settings.tenant_tokens, "requests_per_s": spread(capacity, 2)}
        rate = statistics.median(capacity)
        yield _fairness(server, settings, rate)
        yield _flood(server, settings, rate)


def _service(server: Server, settings: Settings, streams: int) -> tuple[Line, float]:
    """S6 with so many streams, and the median seconds between two tokens of one of them."""
    requests = _requests(server, settings, streams, settings.prompt_tokens, settings.output_tokens, _FIRST)
    alone, http = [server.alone(requests, streams)], [server.http(requests, streams)]  # for warmth
    for number in range(_REPEATS if min(alone[0].seconds, http[0].seconds) < _SHORT_S else 1):
        # in turn, and who is first in turn too: what drifts meets both
        for which in ("alone", "http") if number % 2 else ("http", "alone"):
            (alone if which == "alone" else http).append(getattr(server, which)(requests, streams))
    alone, http = alone[1:], http[1:]
    line: Line = {
        "case": "service", "streams": streams, "prompt_tokens": settings.prompt_tokens,
        "output_tokens": settings.output_tokens, **cost(alone, http),
    }  # fmt: skip
    return line, 1e-3 * line["http"]["steady_p50_ms"]["median"]


def _judged(line: Line) -> Line:
    return {
        "goals": {"ratio": 0.95, "http_p99_of_first": 1.5},
        "met": {"ratio": line["ratio"]["median"] > 0.95, "http_p99_of_first": line["http_p99_of_first"] <= 1.5},
    }


def _capacity(server: Server, settings: Settings) -> list[float]:
    """Requests/s with all places taken."""
    count, tokens = 2 * settings.max_requests, settings.tenant_tokens
    requests = _requests(server, settings, count, tokens, tokens, _FIRST)
    rates: list[float] = []
    while len(rates) < 3 and (not rates or count / rates[0] < _SHORT_S):
        rates.append(count / server.http(requests, settings.max_requests).seconds)
    return rates


def _fairness(server: Server, settings: Settings, capacity: float) -> Line:
    """S7: two tenants who both want more than their half."""
    requests = _arrivals(server, settings, {name: rate * capacity for name, rate in _RATES.items()}, settings.seconds)
    result = server.arrivals(requests, settings.seconds)
    tokens, places = settings.tenant_tokens, settings.max_requests
    batch_price = places * tokens * (_PRICES[0] + _PRICES[1])
    line: Line = {"case": "fairness", "rates": _RATES, "seconds": settings.seconds}
    line |= fairness(served(result, requests, _PRICES), (_FIRST, _SECOND), settings.seconds, batch_price)
    # in order of arrival each would get its part of what is asked for
    by_arrival = (_RATES[_SECOND] - _RATES[_FIRST]) / sum(_RATES.values())
    line |= {"growth_by_arrival": round(by_arrival, 4), "batch_price": batch_price}
    line |= {"tenants": {name: latencies(result, requests, name) for name in _RATES}}
    begun = FULL_AFTER * settings.seconds
    line["least_waiting"] = {name: least_waiting(result, requests, name, begun) for name in _RATES}
    # who has nothing waiting gets all that it asks for, which is no matter of fairness
    met = line["difference_second_half"] <= 2.0 if all(line["least_waiting"].values()) else None
    line |= {"goals": {"difference_second_half": 2.0}, "met": {"difference_second_half": met}}
    return line | {"client_cpu_share": round(result["cpu_share"], 3)}


def _flood(server: Server, settings: Settings, capacity: float) -> Line:
    """S7: who sends little, alone and beside a flood."""
    seconds = settings.seconds / 2
    calm = {_FIRST: max(_FEWEST_CALM / seconds, _CALM_RATE * capacity)}
    quiet = _arrivals(server, settings, calm, seconds)
    alone = latencies(server.arrivals(quiet, seconds), quiet, _FIRST)
    both = _arrivals(server, settings, calm | {_SECOND: _RATES[_SECOND] * capacity}, seconds, flood_ahead=_SECOND)
    beside = server.arrivals(both, seconds)
    line: Line = {"case": "flood", "calm_requests_per_s": round(calm[_FIRST], 2), "seconds": seconds}
    line |= {"alone": alone, "beside": latencies(beside, both, _FIRST), "flood": latencies(beside, both, _SECOND)}
    return line


def _requests(
    server: Server, settings: Settings, count: int, prompt_tokens: int, output_tokens: int, tenant: str
) -> list[Line]:
    rng, vocab = random.Random(settings.seed), server.started["vocab"]
    return [
        {
            "index": index,
            "tenant": tenant,
            "prompt": [rng.randrange(10, vocab - 10) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
        }
        for index in range(count)
    ]


def _arrivals(
    server: Server, settings: Settings, rates: Mapping[str, float], seconds: float, flood_ahead: str | None = None
) -> list[Line]:
    """Poisson arrivals of each tenant at its requests/s, all of S7's length; a flood has filled the places before."""
    rng = random.Random(settings.seed)
    times: list[tuple[float, str]] = []
    for tenant, rate in rates.items():
        at = 0.1 * seconds if flood_ahead is not None and tenant != flood_ahead else 0.0
        while (at := at - math.log(1.0 - rng.random()) / rate) < seconds:
            times.append((at, tenant))
    if flood_ahead is not None:
        times += [(0.0, flood_ahead)] * settings.max_requests
    times.sort()
    requests = _requests(server, settings, len(times), settings.tenant_tokens, settings.tenant_tokens, "")
    return [{**one, "at": at, "tenant": tenant} for one, (at, tenant) in zip(requests, times, strict=True)]


def _client(plan: str) -> Line:
    command = [sys.executable, "-m", "peftkit_bench.serve_http_client"]
    done = subprocess.run(command, input=plan, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"a client of the benchmark has failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def rows(lines: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """The table: case, figure, median, range, goal and whether it is met."""
    table: list[list[object]] = []
    for line in lines:
        if line["case"] == "service":
            name, met = f"{line['streams']} streams", line["met"]
            for who in ("engine", "http"):
                table.append(_row(name, f"{who} output tokens/s", line[who]["tok_s"]))
            table.append(_row(name, "http / engine", line["ratio"], "> 0.95", met["ratio"]))
            table.append(_row(name, "service, µs a token", line["cost_us_token"]))
            table.append(_row(name, "CPU time, engine / http", line["cpu_ratio"]))
            table.append(_row(name, "event loop's CPU, µs a token", line["http"]["loop_cpu_us_token"]))
            table.append(_row(name, "engine process's CPU, µs a token", line["http"]["engine_cpu_us_token"]))
            table.append(_row(name, "first token p50, ms", line["http"]["first_p50_ms"]))
            table.append(_row(name, "between tokens p50, ms", line["http"]["steady_p50_ms"]))
            table.append(_row(name, "between tokens p99, ms", line["http"]["steady_p99_ms"]))
            p99, alone = line["http_p99_of_first"], f"engine {line['engine_p99_of_first']}"
            table.append([name, "p99 / fewest streams' cost", p99, alone, "<= 1.5", met["http_p99_of_first"]])
        elif line["case"] == "capacity":
            table.append(_row("capacity", "requests/s", line["requests_per_s"]))
        elif line["case"] == "fairness":
            growth, met = line["growth"], line["met"]["difference_second_half"]
            by_arrival = f"0 (by arrival {line['growth_by_arrival']})"
            shown = [growth["mean"], f"{growth['low']}..{growth['high']}", by_arrival, None]
            table.append(["0.75 and 1.5 of capacity", "difference a served token", *shown])
            widest = line["difference_second_half"]
            fewest = min(line["least_waiting"].values())
            shown = [widest, f"at least {fewest} waiting", "<= 2", met]
            table.append(["0.75 and 1.5 of capacity", "largest difference, batches", *shown])
        elif line["case"] == "flood":
            for name in ("first_p50_ms", "first_p99_ms", "between_p50_ms", "whole_p50_ms"):
                alone, beside = line["alone"][name]["value"], line["beside"][name]["value"]
                table.append(["calm beside a flood", name, beside, f"alone {alone}", None, None])
    return table


def _row(case: str, figure: str, found: Mapping[str, Any], goal: str | None = None, met: bool | None = None) -> Any:
    return [case, figure, found["median"], f"{found['min']}..{found['max']}", goal, met]
