"""What Prometheus reads at `/metrics`: counts and times of this server's requests, and the engine's own counts.

Names of adapters and tenants are labels, so their number is bounded: the first `MAX_ADAPTER_LABELS` pairs that are
asked for have series of their own, later ones share the label "other".
"""

import time
from collections.abc import Iterator, Mapping
from typing import Self, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peftkit.errors import InputError
from peftkit_serve.async_engine import ServedEngine
from peftkit_serve.request import RequestOutput
from peftkit_serve.tenants.catalog import Catalog

MAX_ADAPTER_LABELS = 100
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_GAUGES = {
    "requests_running": "Requests that take part in the engine's steps.",
    "requests_waiting": "Requests that wait for a place in a step.",
    "pages_total": "Pages of KV memory.",
    "pages_free": "Pages of KV memory that nothing holds.",
    "pages_used": "Pages of KV memory that requests and prompt adapters hold.",
    "adapters": "Names of adapters that requests can give.",
    "adapters_resident": "Adapters on the device.",
    "weight_bytes": "Bytes of the base's weights.",
    "kv_bytes": "Bytes of KV memory.",
    "adapter_bytes": "Bytes of adapter memory in use.",
    "adapter_capacity_bytes": "Bytes of adapter memory.",
    "step_bytes": "Bytes that the largest step takes beside.",
    "graph_bytes": "Bytes that captured decode steps take.",
}
_COUNTERS = {
    "steps": "Engine steps.",
    "preemptions": "Times that a running request gave its pages up and went back to waiting.",
    "cached_tokens": "Prompt tokens whose keys and values were there already.",
}


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: ServedEngine, served_name: str, catalog: Catalog) -> None:
        self._registry = CollectorRegistry()
        self._labels = {("", served_name)}
        self.requests = self._counter(
            "requests", "Generation requests that ended, by how.", "tenant", "adapter", "outcome"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", "tenant", "adapter")
        self.generated_tokens = self._counter("generation_tokens", "Generated tokens.", "tenant", "adapter")
        self.refusals = self._counter("refusals", "Requests that must come later, by why.", "tenant", "code")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.queue = self._histogram("queue_seconds", "From a request's arrival to the first step that takes it in.")
        self.between_tokens = self._histogram(
            "time_between_tokens_seconds", "Between one token of a request and the next."
        )
        self.http_answers = self._counter("http_answers", "HTTP answers.", "route", "status")
        self._registry.register(_EngineCollector(engine, catalog))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def track(self, tenant: str, adapter: str) -> "Track":
        """Follows one generation request as a context manager; the base goes by its own name."""
        return Track(self, *self._pair(tenant, adapter))

    def refused(self, tenant: str, code: str) -> None:
        """Counts a request that was refused over a limit."""
        self.refusals.labels(self._pair(tenant, "")[0], code).inc()

    def _pair(self, tenant: str, adapter: str) -> tuple[str, str]:
        if (tenant, adapter) not in self._labels and len(self._labels) > MAX_ADAPTER_LABELS:
            return ("other", "other")
        self._labels.add((tenant, adapter))
        return (tenant, adapter)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"peftkit_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"peftkit_{name}", text, buckets=_SECONDS, registry=self._registry)


class Track:
    """One generation request from its arrival to its end; one that ends without its last output was cancelled."""

    def __init__(self, metrics: Metrics, tenant: str, adapter: str) -> None:
        self._metrics = metrics
        self._labels = (tenant, adapter)
        self._begin = self._last_time = time.monotonic()
        self.outcome = "cancelled"
        self.num_prompt_tokens = 0
        self.num_tokens = 0

    def output(self, output: RequestOutput) -> None:
        """Books one output."""
        now = time.monotonic()
        if output.started is not None:
            self._metrics.queue.observe(max(0.0, output.started - self._begin))
        num_new = len(output.token_ids) - self.num_tokens
        # tokens that come together, because the loop was busy, have come evenly
        share = (now - self._last_time) / max(num_new, 1)
        for number in range(self.num_tokens, self.num_tokens + num_new):
            (self._metrics.between_tokens if number else self._metrics.first_token).observe(share)
        if num_new:
            self._last_time = now
        self.num_tokens += num_new
        self.num_prompt_tokens = output.num_prompt_tokens
        self.outcome = output.finish_reason or self.outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.outcome = "refused" if issubclass(kind, InputError) else "error"
        self._metrics.requests.labels(*self._labels, self.outcome).inc()
        self._metrics.prompt_tokens.labels(*self._labels).inc(self.num_prompt_tokens)
        self._metrics.generated_tokens.labels(*self._labels).inc(self.num_tokens)


class _EngineCollector(Collector):
    """The engine's own counts, asked for when Prometheus asks."""

    def __init__(self, engine: ServedEngine, catalog: Catalog) -> None:
        self._engine, self._catalog = engine, catalog

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        counts = cast(Mapping[str, int], stats)
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"peftkit_{name}", text, value=counts[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"peftkit_{name}", text, value=counts[name])
        routers = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests, for routers that know vLLM; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        shelf = self._catalog.shelf
        for name, text, value in (
            ("adapter_loads", "Adapters read from disk into host memory.", shelf.num_loads),
            ("adapter_load_seconds", "Time that these loads took together.", shelf.load_seconds),
            ("adapter_evictions", "Adapters put away from host memory.", shelf.num_evictions),
        ):
            yield CounterMetricFamily(f"peftkit_{name}", text, value=value)
        distinct = len(stats["running_adapters"])
        yield GaugeMetricFamily("peftkit_step_distinct_adapters", "Adapters of running requests.", value=distinct)
        yield GaugeMetricFamily("peftkit_adapters_loaded", "Adapters in host memory.", value=shelf.num_loaded)
        names = self._names_by_uid({*stats["running_adapters"], *stats["waiting_adapters"]})
        running, waiting = (
            ",".join(sorted({name for uid in uids for name in names.get(uid, ())}))
            for uids in (stats["running_adapters"], stats["waiting_adapters"])
        )
        routers.add_metric([str(stats["adapter_slots"]), running, waiting], time.time())
        yield routers

    def _names_by_uid(self, uids: set[str]) -> dict[str, list[str]]:
        """Every name of these adapters: content that two names share is running under both."""
        names: dict[str, list[str]] = {}
        adapters = self._engine.adapters
        for name in adapters.names() if uids else ():
            try:
                uid = adapters.uid(name)
            except InputError:  # removed since it was listed
                continue
            if uid in uids:
                names.setdefault(uid, []).extend(self._catalog.names_of(name))
        return names
