"""`peftkit bench serve --http`: what its figures say of times that are known, its client, and a toy run."""

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from peftkit.cli.main import run
from peftkit_bench import serve_http_client as client
from peftkit_bench.serve_http_figures import cost, fairness, least_waiting, served, wave


def run_of(starts: list[float], step_s: float, tokens: int, late_s: float = 0.0) -> dict[str, Any]:
    """Streams of one step length, each beginning at its own time."""
    times = [
        {
            "index": index, "sent": start, "status": 200, "tokens": tokens, "fault": "",
            "events": [start + late_s + step_s * (1 + number) for number in range(tokens)],
        }
        for index, start in enumerate(starts)
    ]  # fmt: skip
    return {"begun": 0.0, "ended": max(one["events"][-1] for one in times), "times": times}


def test_the_cost_of_a_service_that_takes_a_tenth_longer() -> None:
    alone = [wave(run_of([0.0, 0.0], 0.010, 50), 0.0, 4e-3) for _ in range(3)]
    http = [wave(run_of([0.0, 0.0], 0.011, 50), 1e-3, 4e-3) for _ in range(3)]
    line = cost(alone, http)
    assert line["ratio"]["median"] == pytest.approx(1 / 1.1, rel=1e-3)
    assert line["cost_us_token"]["median"] == pytest.approx(1e6 * 0.001 / 2, rel=1e-3)
    assert line["http"]["steady_p99_ms"]["median"] == pytest.approx(11.0)
    assert line["http"]["loop_cpu_us_token"]["median"] == pytest.approx(10.0)
    assert line["cpu_ratio"]["median"] == pytest.approx(4 / 5)


def test_gaps_count_as_steady_only_while_all_streams_run() -> None:
    result = run_of([0.0, 1.0], 0.1, 20)
    found = wave(result, 0.0, 0.0)
    assert len(found.gaps_s) == 38 and len(found.steady_gaps_s) == pytest.approx(2 * 9, abs=2)
    result["times"][1]["fault"] = "the connection was closed"
    with pytest.raises(AssertionError, match="request 1"):
        wave(result, 0.0, 0.0)


@pytest.mark.parametrize(("share", "growth"), [(0.5, 0.0), (1 / 3, 1 / 3)])
def test_the_difference_of_two_tenants_grows_as_they_are_served(seed: int, share: float, growth: float) -> None:
    rng = random.Random(seed)
    requests = [{"tenant": "second" if rng.random() > share else "first", "prompt": [0] * 5} for _ in range(4000)]
    times = [
        {
            "index": index,
            "tokens": 10 * (index % 3 > 0),
            "events": [index * 0.01 + step * 0.001 for step in range(1, 6)],
        }
        for index in range(len(requests))
    ]
    services = served({"begun": 0.0, "times": times}, requests, (1.0, 2.0))
    total = sum(priced.sum() for _, priced in services.values())
    assert total == len(requests) * (5 + 2 * 10) and all((np.diff(at) >= 0).all() for at, _ in services.values())
    line = fairness(services, ("first", "second"), 40.0, batch_price=150.0)
    assert line["growth"]["low"] - 0.05 < growth < line["growth"]["high"] + 0.05
    assert (line["difference_end"] > 40.0) is (growth > 0.0)


def test_who_waits_is_counted_until_its_first_token() -> None:
    requests = [{"tenant": name} for name in ("first", "second", "first", "second")]
    sent, first = (0.0, 0.0, 0.2, 1.0), (9.0, 5.0, None, None)
    times = [
        {
            "index": i,
            "sent": sent[i],
            "status": 429 if i == 3 else 200,
            "events": [] if first[i] is None else [first[i]],
        }
        for i in range(4)
    ]
    result = {"begun": 0.0, "ended": 10.0, "times": times}
    assert least_waiting(result, requests, "first", 1.0) == 1
    assert least_waiting(result, requests, "first", 0.0) == 1
    assert least_waiting(result, requests, "second", 1.0) == 0


async def answered(parts: list[bytes]) -> client.Times:
    """What the client makes of an answer that comes in these parts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    clients = client.Clients(host, port)
    await clients.connect(1)
    await asyncio.wait_for(clients.streams([client._Order(0, 0.0, b"POST / HTTP/1.1\r\n\r\n")], 1), 10)
    clients.close()
    server.close()
    return clients.times[0]


def stream_of(texts: list[str]) -> bytes:
    """An answer as a server sends it: an event a chunk, then the token counts."""
    events = [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n" for text in texts]
    events.append(f"data: {json.dumps({'usage': {'completion_tokens': 7}}, separators=(',', ':'))}\n\n")
    events.append("data: [DONE]\n\n")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in map(str.encode, events))
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
async def test_the_client_counts_events_however_they_are_cut(size: int) -> None:
    sent = stream_of(["a", "\ndata: {", "data: {", "d" * 3000, "e"])
    times = await answered([sent[i : i + size] for i in range(0, len(sent), size)])
    assert (times.status, len(times.events), times.tokens, times.fault) == (200, 5, 7, "")


async def test_the_client_tells_refusals_from_answers_that_broke_off() -> None:
    body = b'{"error": {"code": "queue_full"}}'
    refused = await answered([b"HTTP/1.1 429 X\r\nContent-Length: %d\r\n\r\n" % len(body), body])
    assert refused.status == 429 and "queue_full" in refused.fault and not refused.events
    error = stream_of([]).replace(b'"completion_tokens"', b'"error"')
    failed = await answered([error])
    assert failed.status == 200 and failed.fault


def test_a_toy_run_measures_the_service_beside_its_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--http", "--quick", "--shape", "toy", "--device", "cpu", "--streams", "2", "--seconds", "2"]
    code = run(["bench", "serve", *options])
    printed = capsys.readouterr().out
    assert code == 0, printed
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == ["start", "service", "capacity", "fairness", "flood"]
    http, engine = lines[1]["http"], lines[1]["engine"]
    assert http["tok_s"]["repeats"] == engine["tok_s"]["repeats"] == 5
    assert http["events_per_token"]["max"] > 0.9  # no token is part of a character, which would come late
    assert http["loop_cpu_us_token"]["median"] > engine["loop_cpu_us_token"]["median"] > 0
    assert all(line["commit"] and line["seed"] == 0 and line["hardware"]["cores"] for line in lines)
    fair = lines[3]
    assert fair["tenants"]["second"]["requests"] > fair["tenants"]["first"]["requests"]
    assert min(fair["served"].values()) > 0 and "0.75 and 1.5 of capacity" in printed
