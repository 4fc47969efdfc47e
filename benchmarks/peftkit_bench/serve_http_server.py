"""The server of `peftkit bench serve --http`: what `peftkit serve` starts, over a base made on the spot.

It reads JSON lines on stdin and answers on stdout: first what to serve, answered by its address and the tenants' keys;
then each time what to do with the same engine without HTTP, while no client asks: the event loop that serves asks the
engine's process itself. It ends when stdin does.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from peftkit_bench.serve_inputs import SHAPES, RandomBase, random_tensors, write_base
from peftkit_serve import Engine, EngineProcess, Request, SamplingParams
from peftkit_serve.http import Settings, bind, create_app, serve, url_of, write_json_lines
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.fair_share import FairShare
from peftkit_serve.tenants.records import Limits

MODEL = "base"


def make_engine(asked: dict[str, Any], folder: Path) -> Engine:
    """An engine over a random base of a shape, whose config and tokenizer go to `folder`, or over the base of that
    name."""
    sizes = {name: asked[name] for name in ("quant", "device", "max_requests", "max_tokens_per_step", "num_pages")}
    if asked["shape"] not in SHAPES:
        return Engine(asked["shape"], policy=FairShare(), prefix_cache=False, **sizes)
    base = RandomBase(MODEL, write_base(folder, SHAPES[asked["shape"]], asked["max_positions"]))
    return Engine(base, policy=FairShare(), prefix_cache=False, source=random_tensors, **sizes)


def add_tenants(database: Database, names: Sequence[str]) -> dict[str, str]:
    """Tenants with a key each, and default limits."""
    keys: dict[str, str] = {}
    for name in names:
        database.add_tenant(name, Limits(), ["*"])
        keys[name] = database.add_key(name).text
    return keys


async def run_alone(engine: EngineProcess, requests: Sequence[dict[str, Any]], streams: int) -> dict[str, Any]:
    """The client's plan of streams, without HTTP; the same figures."""
    following = iter(requests)
    times: list[dict[str, Any]] = []

    async def stream(following: Iterator[dict[str, Any]]) -> None:
        for one in following:
            params = SamplingParams(temperature=0.0, max_tokens=one["max_tokens"], ignore_eos=True)
            request = Request(prompt=one["prompt"], sampling=params, tenant=one["tenant"])
            sent, events, tokens = time.perf_counter(), list[float](), 0
            async for output in engine.generate(request):
                if len(output.token_ids) > tokens:
                    events.append(time.perf_counter())
                    tokens = len(output.token_ids)
            times.append(
                {"index": one["index"], "sent": sent, "status": 200, "events": events, "tokens": tokens, "fault": ""}
            )

    begun, begun_cpu = time.perf_counter(), time.thread_time()
    await asyncio.gather(*(stream(following) for _ in range(streams)))
    ended, cpu = time.perf_counter(), time.thread_time() - begun_cpu
    return {"begun": begun, "ended": ended, "loop_cpu_s": cpu, "times": times}


def obey(engine: EngineProcess, loop: asyncio.AbstractEventLoop) -> None:
    """Runs on a thread of its own until stdin ends. Asked nothing, it says how much CPU time was taken so far: by the
    event loop's thread, and by the engine's process."""
    thread = threading.main_thread().ident
    assert thread is not None
    clocks = {"loop": time.pthread_getcpuclockid(thread), "engine": _clock_of(engine.pid)}
    for line in sys.stdin:
        asked = json.loads(line)
        if asked:
            work = run_alone(engine, asked["requests"], asked["streams"])
            say(asyncio.run_coroutine_threadsafe(work, loop).result())
        else:
            say({name: time.clock_gettime(clock) for name, clock in clocks.items()})
    os.kill(os.getpid(), signal.SIGTERM)


def _clock_of(process: int) -> int:
    """The clock of a process's CPU time, as clock_getcpuclockid(3) makes it."""
    return ~process << 3 | 2


def say(answer: dict[str, Any]) -> None:
    """One line to who started this."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves until stdin ends."""
    asked = json.loads(sys.stdin.readline())
    begun = time.perf_counter()
    with bind("127.0.0.1", 0, any_client=False) as listener, tempfile.TemporaryDirectory() as folder:
        engine = EngineProcess()
        engine.make(partial(make_engine, asked, Path(folder)))
        made = time.perf_counter() - begun
        settings = Settings(store=Path(folder) / "store", max_waiting=4096, drain_timeout_s=0.0)
        app = create_app(engine, served_name=MODEL, settings=settings)
        keys = add_tenants(app.state.database, asked["tenants"])
        write_json_lines()

        def ready() -> None:
            say({
                "url": url_of(listener), "keys": keys, "engine_s": made, "start_s": time.perf_counter() - begun,
                "vocab": engine.spec.vocab_size, "pages": engine.stats()["pages_total"],
            })  # fmt: skip
            threading.Thread(target=obey, args=(engine, asyncio.get_running_loop()), daemon=True).start()

        serve(app, listener, ready)
