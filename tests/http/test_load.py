"""Under load: every kind in one batch, many streams, floods, time limits, slow readers, and the end of the server."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from peftkit.artifact import write_adapter
from peftkit.errors import InputError
from peftkit.methods import BottleneckConfig, LoraConfig, PrefixTuningConfig, PTuningConfig, PTuningV2Config
from peftkit.methods.prefix import kv_width
from peftkit_serve.tenants.admission import Admission, Refusal
from peftkit_serve.tenants.fair_share import FairShare
from peftkit_serve.tenants.records import Limits

LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def write_kinds(root: Path, config: Any, module_shapes: Any) -> dict[str, Path]:
    """One adapter of each kind that the other tests lack, with large random effects."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, by: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * by

    bottleneck = BottleneckConfig(bottleneck_size=5).resolved(config.hidden_size)
    shapes = bottleneck.expected_tensors(config.num_hidden_layers, config.hidden_size)
    made: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
        "bottleneck": (bottleneck, {name: random(*shape) for name, shape in shapes.items()})
    }
    dora = LoraConfig(r=3, alpha=6.0, targets=["q_proj", "down_proj"], variant="dora")
    tensors: dict[str, torch.Tensor] = {}
    for path, site in dora.resolve(module_shapes).items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = random(site.r, site.in_features)
        tensors[f"base_model.model.{path}.lora_B.weight"] = random(site.out_features, site.r)
        tensors[f"base_model.model.{path}.lora_magnitude_vector"] = random(site.out_features).abs() + 0.5
    made["dora"] = (dora, tensors)
    wide = config.num_hidden_layers * 2 * kv_width(config)
    for kind, method, width in (
        ("prefix", PrefixTuningConfig, wide),
        ("ptuning_v2", PTuningV2Config, wide),
        ("ptuning", PTuningConfig, config.hidden_size),
    ):
        made[kind] = (method(num_virtual_tokens=9), {"prompt_embeddings": random(9, width, by=1.0)})
    record = {"base": {"layers": config.num_hidden_layers, "kv_heads": config.num_key_value_heads}}
    return {kind: write_adapter(root / kind, method, tensors, record).path for kind, (method, tensors) in made.items()}


def test_every_kind_in_one_batch_answers_as_alone(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path], tmp_path: Path,
    base_config: Any, base_shapes: Any,
) -> None:  # fmt: skip
    folders = write_kinds(tmp_path, base_config, base_shapes) | {
        name: adapter_folders[name] for name in ("red", "soft")
    }
    engine = make_engine(max_requests=16, max_adapters=8)
    for name, folder in folders.items():
        engine.adapters.add(name, folder)
    names = ["tiny", *folders]
    with serve(engine) as served:

        async def ask(client: openai.AsyncOpenAI, i: int) -> str:
            fields: dict[str, Any] = {"model": names[i % len(names)], "prompt": f"prompt {i}", "seed": i, **LONG}
            return (await client.completions.create(**fields, max_tokens=24)).choices[0].text

        async def both() -> tuple[list[str], list[str]]:
            async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
                together = list(await asyncio.gather(*(ask(client, i) for i in range(2 * len(names)))))
                return together, [await ask(client, i) for i in range(2 * len(names))]

        together, alone = asyncio.run(both())
        assert together == alone and len(set(together)) == 2 * len(names)
        served.wait_idle()


async def gaps(client: openai.AsyncOpenAI, tokens: int, **fields: Any) -> list[float]:
    """Seconds between one piece of a stream and the next."""
    stream = await client.completions.create(
        model="tiny", prompt="a", max_tokens=tokens, stream=True, temperature=0, **fields
    )
    times = [time.monotonic() async for _ in stream]
    return [b - a for a, b in pairwise(times)]


def test_256_streams_all_end_and_the_loop_keeps_up(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    engine = make_engine(max_requests=256, max_tokens_per_step=512, num_pages=1024)
    bias = {"extra_body": {"ignore_eos": True, "logit_bias": {"113": 100}}}
    with serve(engine, max_waiting=512) as served:

        async def run() -> list[list[float]]:
            limits = httpx.Limits(max_connections=300)
            http = httpx.AsyncClient(limits=limits, timeout=120)
            url = f"{served.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, http_client=http) as client:
                return list(await asyncio.gather(*(gaps(client, 24, **bias) for _ in range(256))))

        found = asyncio.run(run())
        assert len(found) == 256 and all(one for one in found)
        served.wait_idle()
    print(f"p99 between pieces with 256 streams: {np.percentile(np.concatenate(found), 99):.3f} s")


def test_a_flood_of_one_tenant_leaves_anothers_first_token_soon(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    engine = make_engine(max_requests=8, policy=FairShare())
    with serve(engine) as served:
        keys: dict[str, str] = {}
        for name in ("flood", "calm"):
            keys[name] = served.database.add_tenant(name, Limits(), ["*"]).text
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}

        def open_stream() -> None:
            headers = {"authorization": f"Bearer {keys['flood']}"}
            try:
                with httpx.stream(
                    "POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60
                ) as answer:
                    for _ in answer.iter_lines():
                        if done.is_set():
                            return
            except httpx.HTTPError:
                pass

        done = threading.Event()
        threads = [threading.Thread(target=open_stream) for _ in range(24)]
        for thread in threads:
            thread.start()
        while served.engine.stats()["requests_waiting"] < 10:
            time.sleep(0.01)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=keys["calm"], max_retries=0) as client:
            for _ in range(3):
                steps = served.engine.stats()["steps"]
                client.completions.create(model="tiny", prompt="abc", max_tokens=1)
                assert served.engine.stats()["steps"] - steps < 60, "one request of the flood takes 1500 steps"
        assert served.engine.stats()["requests_waiting"] > 0, "the flood was over"
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_its_reason(
    make_engine: Callable[..., Any], serve: Callable[..., Any], stream: bool
) -> None:
    with serve(make_engine(), request_timeout_s=0.3) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            fields: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2000, **LONG}
            with pytest.raises(openai.APIError, match=r"took more than 0\.3 s") as caught:
                answer: Any = client.completions.create(**fields, stream=stream)
                list(answer)
            assert caught.value.code == "timeout"
            assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        served.wait_idle()


def test_a_request_that_waits_too_long_ends_without_harm(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    with serve(make_engine(max_requests=1), queue_timeout_s=0.3) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            fields: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2000, **LONG}
            running = client.completions.create(**fields, stream=True)
            next(iter(running))
            with pytest.raises(openai.InternalServerError, match="waited") as caught:
                client.completions.create(**fields)
            assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
            assert served.engine.stats()["requests_running"] == 1
            running.close()
        served.wait_idle()


def test_a_full_queue_is_429_with_a_time(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    with serve(make_engine(max_requests=1), max_waiting=2) as served, ThreadPoolExecutor(1) as other:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            running = client.completions.create(model="tiny", prompt="a", max_tokens=2000, stream=True, **LONG)
            next(iter(running))
            waiting = other.submit(httpx.post, f"{served.url}/v1/completions", json=body | {"n": 2}, timeout=60)
            deadline = time.monotonic() + 30
            while served.service.admission.num_waiting("") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            answer = httpx.post(f"{served.url}/v1/completions", json=body)
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            running.close()
            assert waiting.result().status_code == 200
        never = httpx.post(f"{served.url}/v1/completions", json=body | {"n": 3})
        assert never.status_code == 400 and never.json()["error"]["param"] == "n"
        text = httpx.get(f"{served.url}/metrics").text
        assert 'peftkit_refusals_total{code="queue_full",tenant=""} 1.0' in text


def test_a_slow_reader_holds_no_pages_and_gets_its_whole_answer(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    with serve(make_engine()) as served:
        body = json.dumps(
            {"model": "tiny", "prompt": "a", "max_tokens": 1900, "stream": True, "ignore_eos": True, "seed": 3}
        ).encode()
        host, port = served.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
            )
            deadline = time.monotonic() + 60
            while served.engine.stats()["generated_tokens"] < 1900:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            served.wait_idle()
            assert served.engine.stats()["pages_used"] == 0
            received = b""
            connection.settimeout(20)
            while block := connection.recv(65536):
                received += block
        text = received.decode()
        assert "data: [DONE]" in text and '"finish_reason":"length"' in text


def test_one_sigterm_ends_a_server_whose_streams_go_on_and_whose_bodies_dont_come(base_folder: Path) -> None:
    command = [sys.executable, "-m", "peftkit.cli.main", "serve", "--base", str(base_folder), "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--drain-timeout", "0.5"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        host, port = url.removeprefix("http://").split(":")
        half = socket.create_connection((host, int(port)), timeout=20)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client, half:
            half.sendall(head + b"Content-Length: 100\r\n\r\n{")
            fields: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2000, "stream": True, **LONG}
            streams = [client.completions.create(**fields) for _ in range(8)]
            for stream in streams:
                next(iter(stream))
            process.send_signal(signal.SIGTERM)
            ended = time.monotonic()
            for stream in streams:
                with pytest.raises(openai.APIError, match="stopped"):
                    list(stream)
            assert half.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert process.wait(timeout=20) == 0 and time.monotonic() - ended < 15
    finally:
        process.kill()
        process.wait()


def test_buckets_fill_with_time_and_say_the_time() -> None:
    now = 0.0
    admission = Admission(clock=lambda: now)
    limits = Limits(requests_per_minute=60, tokens_per_minute=600)

    def enter(tokens: int = 0, tenant: str = "a") -> None:
        with admission.enter(tenant, limits, answers=1, prompt_tokens=tokens):
            pass

    for _ in range(60):
        enter()
    with pytest.raises(Refusal) as refused:
        enter()
    assert refused.value.code == "requests_limit_exceeded" and refused.value.retry_after_s == 1
    enter(tenant="b")
    now = 1.0
    enter()
    now = 120.0
    with admission.enter("a", limits, answers=1, prompt_tokens=100) as visit:
        visit.generated(700)
    with pytest.raises(Refusal) as refused:
        enter(50)
    assert refused.value.code == "tokens_limit_exceeded" and refused.value.retry_after_s == 25, (
        "250 tokens, 10 a second"
    )
    now = 145.0
    enter(50)


def test_visits_return_what_they_took_whatever_ends_them() -> None:
    admission = Admission(max_waiting=4)
    for started in (0, 1, 3):
        try:
            with admission.enter("a", Limits(), answers=3, prompt_tokens=1) as visit:
                assert (admission.num_live("a"), admission.num_waiting("a")) == (3, 3)
                for _ in range(started):
                    visit.started()
                assert admission.num_waiting("a") == 3 - started
                raise KeyError
        except KeyError:
            pass
        assert (admission.num_live("a"), admission.num_waiting("a")) == (0, 0)
    with admission.enter("a", Limits(), answers=3, prompt_tokens=1):
        with pytest.raises(Refusal, match="server's queue"):
            admission.enter("a", Limits(max_queue=None), answers=2, prompt_tokens=1)
    with pytest.raises(InputError, match="this server's limit is 4"):
        admission.enter("a", Limits(max_queue=None), answers=5, prompt_tokens=1)


def test_a_tenant_that_fills_the_servers_queue_shuts_no_other_out() -> None:
    admission, limits = Admission(max_waiting=4), Limits(max_queue=None)
    for _ in range(4):
        admission.enter("flood", limits, answers=1, prompt_tokens=1)
    with pytest.raises(Refusal, match="server's queue"):
        admission.enter("flood", limits, answers=1, prompt_tokens=1)
    visit = admission.enter("calm", limits, answers=2, prompt_tokens=1)
    with pytest.raises(Refusal, match="server's queue"):
        admission.enter("calm", limits, answers=1, prompt_tokens=1)
    visit.started()
    visit.started()
    admission.enter("calm", limits, answers=1, prompt_tokens=1)


@pytest.mark.parametrize("limits", [Limits(requests_per_minute=1), Limits(tokens_per_minute=100)])
def test_a_request_that_fails_before_its_first_token_takes_nothing_of_the_rates(limits: Limits) -> None:
    now = 0.0
    admission = Admission(clock=lambda: now)

    def enter(error: type[BaseException] | None, *, started: bool) -> None:
        with suppress(KeyError, GeneratorExit):
            with admission.enter("a", limits, answers=2, prompt_tokens=100) as visit:
                if started:
                    visit.started()
                if error is not None:
                    raise error

    for _ in range(5):
        enter(KeyError, started=False)
    for error, started in ((None, True), (KeyError, True), (GeneratorExit, False)):
        enter(error, started=started)
        with pytest.raises(Refusal, match="a minute"):
            enter(None, started=True)
        now += 60
