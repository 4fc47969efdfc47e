"""OpenTelemetry spans of generation requests, where a collector is named; nothing of it is imported where none is.

    POST /v1/chat/completions     the HTTP request, FastAPI's own span: a child of the client's `traceparent`
      chat NAME                   from the checked request to its last token, by the GenAI semantic conventions
        adapter                   until the adapter is in host memory
        queue                     until a step takes the first of its answers in
        prefill                   until the first token
        decode                    until the end

Attributes are numbers and names: never a prompt, an answer, a stop string or a key. Times are in seconds and stand
under vLLM's names beside the conventions'.
"""

import math
import os
import time
from collections.abc import Mapping
from contextlib import aclosing
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request

from peftkit.errors import InputError
from peftkit_serve.http.errors import ApiError
from peftkit_serve.http.schemas import Sampling
from peftkit_serve.http.service import Outputs
from peftkit_serve.request import RequestOutput
from peftkit_serve.tenants.admission import Refusal

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer, TracerProvider

Operation = Literal["chat", "text_completion"]

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
_REQUEST_FIELDS = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HTTP, _GRPC = "http/protobuf", "grpc"


def open_provider(
    endpoint: str | None = None, environment: Mapping[str, str] = os.environ
) -> "SdkTracerProvider | None":
    """Where spans go by OTLP; None where nobody asks for them. Its `shutdown` sends the last ones.

    endpoint: a collector's whole address for traces; None for what OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
    OTEL_EXPORTER_OTLP_ENDPOINT say. The other OTEL_* variables hold as the SDK reads them: protocol, headers, service
    name, sampler, batches, OTEL_TRACES_EXPORTER=none, OTEL_SDK_DISABLED=true.

    Raises InputError (field "otlp-traces-endpoint") for a missing package, and for what can't be sent to.
    """
    named = endpoint or _first(environment, *_ENDPOINTS)
    exporter = _first(environment, "OTEL_TRACES_EXPORTER") or "otlp"
    if not named or exporter == "none" or _first(environment, "OTEL_SDK_DISABLED").lower() == "true":
        return None
    protocol = _first(environment, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or _HTTP
    if exporter != "otlp":
        raise _refused(f"OTEL_TRACES_EXPORTER is {exporter!r}: it must be otlp or none")
    if protocol not in (_HTTP, _GRPC):
        raise _refused(f"the OTLP protocol is {protocol!r}: it must be {_HTTP} or {_GRPC}")
    if protocol == _HTTP and not named.startswith(("http://", "https://")):
        where = "--otlp-traces-endpoint" if endpoint else "the collector's address"
        raise _refused(f"{where} is {named}: it must begin with http:// or https://")
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        processor = BatchSpanProcessor(_exporter(protocol, endpoint))
    except ModuleNotFoundError as error:
        package = "opentelemetry-exporter-otlp-proto-grpc" if protocol == _GRPC else "'peftkit[otel]'"
        raise _refused(f"sending traces to {named} needs the package {error.name}: pip install {package}") from None
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "peftkit"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor)
    return provider


def fastapi_telemetry(provider: "TracerProvider | None") -> "TelemetryConfig":
    """What FastAPI traces by itself: requests. Not its logs, which quote exceptions, and these may quote prompts."""
    return {
        "tracer_provider": provider,
        "tracing": provider is not None,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope["path"] in _QUIET_PATHS,
    }


class Tracing:
    """Makes a `Trace` of each generation request."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import propagate, trace

        self._api, self._propagate = trace, propagate
        self._tracer = provider.get_tracer("peftkit")

    def begin(
        self, operation: Operation, body: Sampling, request: Request, adapter: str, num_prompt_tokens: int
    ) -> "Trace":
        """Begins a request's span, below the HTTP request's or else the client's, and tells the log its trace's id.

        adapter: what `model` came to. num_prompt_tokens: of all prompts, each counted once.
        """
        parent = None  # the current one
        if not self._api.get_current_span().get_span_context().is_valid:
            parent = self._propagate.extract(request.headers)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "peftkit",
            "gen_ai.request.model": body.model,
            "gen_ai.request.stream": bool(body.stream),
            "gen_ai.request.choice.count": body.num_choices,
            "gen_ai.request.max_tokens": body.max_completion_tokens or body.max_tokens,
            **{f"gen_ai.request.{name}": getattr(body, name) for name in _REQUEST_FIELDS},
            "gen_ai.response.model": adapter,
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "peftkit.request_id": request.state.request_id,
            "peftkit.tenant": request.state.facts.get("tenant", ""),
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        now_ns = time.time_ns()
        span = self._tracer.start_span(f"{operation} {body.model}", parent, attributes=known, start_time=now_ns)
        request.state.facts["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        return Trace(self._tracer, span, now_ns, request.state.facts)


class Trace:
    """One generation request's span, which ends with its answers."""

    def __init__(self, tracer: "Tracer", span: "Span", begin_ns: int, facts: Mapping[str, Any]) -> None:
        """begin_ns: when the span began, since the epoch. facts: what the log is told of the request."""
        self._tracer, self._span, self._facts = tracer, span, facts
        self._begin_ns, self._begin = begin_ns, time.monotonic()
        self._started = self._first = math.inf
        self._last: dict[int, RequestOutput] = {}

    async def follow(self, outputs: Outputs) -> Outputs:
        """The outputs as they are; the span ends with them, whatever ends them."""
        error: BaseException | None = None
        try:
            async with aclosing(outputs):
                async for index, output in outputs:
                    self._last[index] = output
                    if output.started is not None:
                        self._started = min(self._started, output.started)
                    if output.token_ids:
                        self._first = min(self._first, time.monotonic())
                    yield index, output
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        end = time.monotonic()
        queued = self._begin + self._facts.get("adapter_ms", 0.0) / 1000
        begins = {"queue": queued, "prefill": max(queued, self._started), "decode": self._first}
        if "adapter_ms" in self._facts:
            begins = {"adapter": self._begin, **begins}
        phases = {name: begin for name, begin in begins.items() if begin < end}
        self._span.set_attributes(self._outcome(phases, end))
        if error is not None:
            self._span.set_attribute("error.type", _type_of(error))
        if isinstance(error, Exception):  # else the client went away
            self._span.set_status(StatusCode.ERROR)
        parent = set_span_in_context(self._span)
        for (phase, start), (_, stop) in pairwise([*phases.items(), ("", end)]):
            self._tracer.start_span(phase, parent, start_time=self._ns(start)).end(self._ns(stop))
        self._span.end(self._ns(end))

    def _outcome(self, phases: Mapping[str, float], end: float) -> dict[str, Any]:
        outputs = self._last.values()
        made: dict[str, Any] = {
            "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
            "gen_ai.latency.e2e": end - self._begin,
        }
        if reasons := [output.finish_reason for output in outputs if output.finish_reason is not None]:
            made["gen_ai.response.finish_reasons"] = reasons
        if "prefill" in phases:
            made["gen_ai.latency.time_in_queue"] = phases["prefill"] - phases["queue"]
        if "decode" in phases:
            made["gen_ai.latency.time_to_first_token"] = phases["decode"] - self._begin
            made["gen_ai.response.time_to_first_chunk"] = made["gen_ai.latency.time_to_first_token"]
        return made

    def _ns(self, moment: float) -> int:
        return self._begin_ns + int((moment - self._begin) * 1e9)


def _exporter(protocol: str, endpoint: str | None) -> "SpanExporter":
    """Sends by OTLP; without an endpoint, where the environment says."""
    if protocol == _GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # pyright: ignore
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    return OTLPSpanExporter(endpoint=endpoint)


def _type_of(error: BaseException) -> str:
    """What went wrong, as programs are told it: never a message, which may quote a prompt."""
    code = error.body.error.code if isinstance(error, ApiError) else getattr(error, "code", None)
    return str(code) if isinstance(error, ApiError | Refusal) and code else type(error).__name__


def _first(environment: Mapping[str, str], *names: str) -> str:
    """The first of these variables that says something."""
    return next((value for name in names if (value := environment.get(name, "").strip())), "")


def _refused(message: str) -> InputError:
    return InputError(message, field="otlp-traces-endpoint")
