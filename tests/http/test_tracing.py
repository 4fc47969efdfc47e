"""OpenTelemetry spans: one a request with its phases, below the client's trace; and none where nobody asks."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from peftkit.cli.main import run
from peftkit.errors import InputError
from peftkit_serve.http.tracing import open_provider
from peftkit_serve.tenants.records import Limits

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET = "a-hidden-word"


class Traced:
    """A server whose finished spans lie in memory."""

    def __init__(self, server: Any, exporter: InMemorySpanExporter) -> None:
        self.server, self._exporter = server, exporter

    def post(self, path: str, **body: Any) -> httpx.Response:
        self._exporter.clear()
        return httpx.post(f"{self.server.url}/v1/{path}", json=body, headers=HEADERS, timeout=30)

    def spans(self, num: int) -> dict[str, ReadableSpan]:
        """The finished spans by name."""
        return {span.name: span for span in self.all(num)}

    def all(self, num: int) -> Sequence[ReadableSpan]:
        """The finished spans, when there are so many: the last ones end after the client has its answer."""
        deadline = time.monotonic() + 5
        while len(found := self._exporter.get_finished_spans()) < num:
            assert time.monotonic() < deadline, [span.name for span in found]
            time.sleep(0.005)
        assert len(found) == num, [span.name for span in found]
        return found


@pytest.fixture
def traced(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path], tmp_path: Path
) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    roots = (adapter_folders["red"].parent,)
    with serve(
        make_engine(max_requests=2), store=tmp_path / "store", adapter_roots=roots, tracer_provider=provider
    ) as server:
        body = {"name": "red", "path": str(adapter_folders["red"])}
        assert httpx.post(f"{server.url}/v1/adapters", json=body).status_code == 201
        made = Traced(server, exporter)
        made.all(1)
        yield made
        server.wait_idle()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_phases_below_the_clients(traced: Traced, stream: bool) -> None:
    answer = traced.post(
        "completions", model="red", prompt="abcd", max_tokens=6, temperature=0.5, ignore_eos=True, stream=stream, n=2
    )
    assert answer.status_code == 200
    spans = traced.spans(6)
    http, made = spans["POST /v1/completions"], spans["text_completion red"]
    assert http.kind == SpanKind.SERVER and http.parent is not None and http.context is not None
    assert (f"{http.parent.trace_id:032x}", f"{http.parent.span_id:016x}") == (TRACE, PARENT)
    assert made.parent is not None and made.context is not None and made.parent.span_id == http.context.span_id
    facts = dict(made.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "peftkit",
        "gen_ai.request.model": "red",
        "gen_ai.response.model": "red@1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": stream,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "peftkit.request_id": answer.headers["x-request-id"],
        "peftkit.tenant": "",
    }
    assert {name: facts.get(name) for name in expected} == expected
    phases = [spans[name] for name in ("adapter", "queue", "prefill", "decode")]
    assert all(one.parent is not None and one.parent.span_id == made.context.span_id for one in phases)
    edges = [made.start_time, *(one.end_time for one in phases)]
    assert [one.start_time for one in phases] == edges[:-1] and edges[-1] == made.end_time
    assert sum(map(seconds, phases)) == pytest.approx(seconds(made), abs=1e-6)
    assert facts["gen_ai.latency.time_in_queue"] == pytest.approx(seconds(spans["queue"]), abs=1e-6)
    first = sum(seconds(spans[name]) for name in ("adapter", "queue", "prefill"))
    assert facts["gen_ai.response.time_to_first_chunk"] == pytest.approx(first, abs=1e-6)
    assert made.status.status_code == http.status.status_code == StatusCode.UNSET


def test_time_in_the_queue_is_that_before_the_first_step(traced: Traced) -> None:
    long = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{traced.server.url}/v1/completions", json=long, timeout=30) as busy:
        lines = busy.iter_lines()
        next(lines)
        begin = time.monotonic()
        assert traced.post("completions", model="tiny", prompt="c", max_tokens=1, ignore_eos=True).status_code == 200
        took = time.monotonic() - begin
        assert list(lines)[-2] == "data: [DONE]"
    made = [dict(span.attributes or {}) for span in traced.all(10)]
    (waited,) = [facts for facts in made if facts.get("gen_ai.usage.output_tokens") == 1]
    in_queue, first = waited["gen_ai.latency.time_in_queue"], waited["gen_ai.latency.time_to_first_token"]
    assert 0.5 * took < in_queue < first < took


def test_no_span_holds_a_prompt_an_answer_or_a_key(traced: Traced) -> None:
    key = traced.server.database.add_key(None).text
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": SECRET}],
        "stop": [SECRET],
        "max_tokens": 40,
        "ignore_eos": True,
        "user": SECRET,
        "metadata": {"note": SECRET},
    }
    headers = {**HEADERS, "authorization": f"Bearer {key}", "user-agent": SECRET, "baggage": f"a={SECRET}"}
    url = f"{traced.server.url}/v1/chat/completions"
    traced._exporter.clear()
    said = httpx.post(url, json=body, headers=headers).json()["choices"][0]["message"]["content"]
    httpx.post(url, json={**body, "messages": SECRET}, headers=headers)
    httpx.post(url, json={**body, "model": SECRET}, headers=headers)
    dump = "".join(span.to_json() for span in traced.all(7))
    assert "gen_ai.usage.output_tokens" in dump and len(said) > 8
    for hidden in (SECRET, key, key.split("_", 2)[2], json.dumps(said)[1:-1]):
        assert hidden not in dump


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nope", "prompt": "a"}, 404, None),
        ({"model": "tiny", "prompt": "a", "temperature": 9}, 400, None),
        ({"model": "tiny", "prompt": "a"}, 429, "queue_full"),
    ],
)
def test_a_refused_request_has_its_code_in_place_of_tokens(
    traced: Traced, body: dict[str, Any], status: int, code: str | None
) -> None:
    admission = traced.server.service.admission
    with admission.enter("", Limits(max_queue=None), answers=admission._max_waiting, prompt_tokens=0):
        assert traced.post("completions", **body).status_code == status
    spans = traced.spans(1 if code is None else 3)
    assert (spans["POST /v1/completions"].attributes or {})["http.response.status_code"] == status
    if code is not None:
        made = spans["text_completion tiny"]
        assert (made.attributes or {})["error.type"] == code and made.status.status_code == StatusCode.ERROR
        assert made.status.description is None and not made.events


def test_a_client_that_goes_away_ends_its_span_without_an_error(traced: Traced) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    traced._exporter.clear()
    with httpx.stream("POST", f"{traced.server.url}/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    made = traced.spans(5)["text_completion tiny"]
    facts = dict(made.attributes or {})
    assert 0 < facts["gen_ai.usage.output_tokens"] < 2000 and "gen_ai.response.finish_reasons" not in facts
    assert made.status.status_code == StatusCode.UNSET and facts["error.type"]


def test_what_machines_ask_every_few_seconds_is_not_traced(traced: Traced) -> None:
    traced._exporter.clear()
    for path in ("health", "ready", "metrics"):
        assert httpx.get(f"{traced.server.url}/{path}").status_code == 200
    httpx.get(f"{traced.server.url}/v1/models")
    assert set(traced.spans(1)) == {"GET /v1/models"}


@contextmanager
def collector() -> Iterator[tuple[str, "queue.Queue[tuple[str, ExportTraceServiceRequest]]"]]:
    """An OTLP collector: its address, and what comes in."""
    arrived: queue.Queue[tuple[str, ExportTraceServiceRequest]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            arrived.put((self.path, ExportTraceServiceRequest.FromString(content)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", arrived
    finally:
        server.shutdown()
        server.server_close()


def served(base_folder: Path, *options: str, **environment: str) -> "subprocess.Popen[str]":
    """`peftkit serve` as a process of its own."""
    command = [sys.executable, "-m", "peftkit.cli.main", "serve", "--base", str(base_folder), "--port", "0", "--json"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean | environment
    )


def test_a_server_sends_its_spans_by_the_standard_variables(base_folder: Path) -> None:
    with collector() as (url, arrived):
        process = served(base_folder, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_SERVICE_NAME="front")
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            body = {"model": "tiny", "prompt": SECRET, "max_tokens": 2}
            assert httpx.post(f"{ready['url']}/v1/completions", json=body, headers=HEADERS).status_code == 200
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=20)
            assert process.returncode == 0, said
        finally:
            process.kill()
        path, sent = arrived.get(timeout=5)
    assert path == "/v1/traces"
    resource = {one.key: one.value.string_value for one in sent.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "front"
    spans = [span for scope in sent.resource_spans[0].scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {"POST /v1/completions", "text_completion tiny", "queue"} <= {span.name for span in spans}
    assert SECRET.encode() not in sent.SerializeToString()
    logged = [json.loads(line) for line in said.splitlines() if "trace_id" in line]
    assert [line["trace_id"] for line in logged] == [TRACE]


def test_without_a_collector_nothing_of_the_sdk_is_imported() -> None:
    program = (
        "import sys; from peftkit_serve.http import create_app; from peftkit_serve.http.tracing import open_provider; "
        "assert open_provider() is None; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    assert subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"},
    ],
)
def test_no_provider_where_none_is_asked_for(environment: dict[str, str]) -> None:
    assert open_provider(environment=environment) is None


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "http://"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "zipkin"}, "otlp or none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/protobuf"),
    ],
)
def test_what_cant_be_sent_to_is_refused_by_name(environment: dict[str, str], wanted: str) -> None:
    with pytest.raises(InputError, match=wanted) as caught:
        open_provider(environment=environment)
    assert caught.value.field == "otlp-traces-endpoint"


def test_traces_without_the_package_are_refused_naming_the_extra(
    base_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    options = ["--base", str(base_folder), "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces"]
    assert run(["serve", *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "peftkit[otel]" in said and "opentelemetry.sdk" in said


def test_grpc_without_its_exporter_is_refused_naming_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(InputError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        open_provider(environment=environment)
