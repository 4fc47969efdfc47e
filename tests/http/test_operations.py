"""Models, health, metrics, the OpenAPI page, logs, and what happens when the engine fails or goes away."""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peftkit_serve.http.logs import JsonLines

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def samples(server: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All of /metrics, through Prometheus' own parser: (name, sorted labels) → value."""
    text = httpx.get(f"{server.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_models_are_the_base_and_its_adapters(client: openai.OpenAI, adapter_folders: dict[str, Path]) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tiny", *sorted(adapter_folders)]
    by_id = {card.id: card.model_dump() for card in cards}
    assert (
        by_id["tiny"]["parent"] is None and by_id["tiny"]["root"] == "tiny" and by_id["tiny"]["max_model_len"] == 2048
    )
    assert by_id["soft"]["parent"] == "tiny" and by_id["soft"]["root"] == str(adapter_folders["soft"])
    assert by_id["soft"]["max_model_len"] == 2028
    assert all(card.object == "model" and card.created > 1.7e9 and card.owned_by for card in cards)


def test_one_model_is_shown_by_any_of_its_names(client: openai.OpenAI) -> None:
    assert client.models.retrieve("red").id == "red"
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("tiny:red").to_dict()["root"] == client.models.retrieve("red").to_dict()["root"]
    for unknown in ("rod", "org/name", "../x"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(unknown)
        assert caught.value.code == "model_not_found"


def test_a_base_with_a_hub_name_is_found(make_engine: Callable[..., Any], serve: Callable[..., Any]) -> None:
    with serve(make_engine(), "org/model") as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            assert client.models.retrieve("org/model").id == "org/model"
            assert client.completions.create(model="org/model", prompt="a", max_tokens=1).choices


def test_health_and_readiness(server: Any) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    answer = httpx.get(f"{server.url}/ready")
    assert answer.status_code == 200 and answer.json() == {"status": "ready"}


def test_health_fails_once_the_engine_has_died_unless_the_server_is_going_away_anyhow(
    make_engine: Callable[..., Any], serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with serve(engine) as served:
        assert httpx.get(f"{served.url}/health").status_code == 200
        answer = httpx.post(f"{served.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert answer.status_code == 500
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503 and health.json() == {"status": "not ready"}
        assert httpx.get(f"{served.url}/ready").status_code == 503
        served.service.draining = True
        assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_draining_server_refuses_new_requests_and_finishes_running_ones(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    with (
        serve(make_engine()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        served.service.draining = True
        ready = httpx.get(f"{served.url}/ready")
        assert ready.status_code == 503 and ready.json() == {"status": "draining"}
        assert httpx.get(f"{served.url}/health").status_code == 200
        for streamed in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="a", stream=streamed)
            assert caught.value.status_code == 503 and caught.value.code == "service_unavailable"
            assert caught.value.response.headers["retry-after"] == "1"
        assert [first, *stream][-1].choices[0].finish_reason == "length"


def test_a_stopped_engine_ends_running_requests_with_an_error_and_is_not_ready(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    with (
        serve(make_engine()) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        whole: list[int] = []
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2000, "ignore_eos": True}
        waiter = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{served.url}/v1/completions", json=body, timeout=20).status_code)
        )
        waiter.start()
        while served.engine.stats()["requests_running"] < 2:
            time.sleep(0.001)
        served.service.engine.stop()
        with pytest.raises(openai.APIError, match="stopped"):
            list(stream)
        waiter.join()
        assert whole == [503]
        assert httpx.get(f"{served.url}/ready").json() == {"status": "not ready"}
        assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 503


def test_a_failing_step_is_500_or_an_error_event_and_the_server_goes_on(
    make_engine: Callable[..., Any], serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with serve(engine) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "tiny", "prompt": "secret", "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**fields, max_tokens=2000, stream=True)
        next(iter(stream))
        with monkeypatch.context() as patch:

            def fail(plan: object) -> None:
                raise RuntimeError("the device is gone with the secret")

            patch.setattr(engine._runner, "run", fail)
            with pytest.raises(openai.APIError, match="failed") as caught:
                list(stream)
            assert "secret" not in caught.value.message
            for streamed in (False, True):
                with pytest.raises(openai.InternalServerError) as refused:
                    client.completions.create(**fields, stream=streamed)
                assert refused.value.status_code == 500 and refused.value.type == "server_error"
        assert client.completions.create(**fields, max_tokens=2).choices
        served.wait_idle()


def test_an_unexpected_exception_is_500_without_traceback_and_logged_without_its_message(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(make_engine()) as served:

        def fail(caller: object, name: str) -> None:
            raise KeyError("a secret prompt")

        monkeypatch.setattr(served.service, "model", fail)
        body = {"model": "tiny", "prompt": "abc"}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, headers={"x-request-id": "req-1"})
        assert answer.status_code == 500 and answer.headers["x-request-id"] == "req-1"
        assert answer.json()["error"]["type"] == "server_error" and "secret" not in answer.text
        assert "Traceback" not in answer.text and ".py" not in answer.text
    logged: list[Any] = [record.msg for record in caplog.records if record.levelno >= logging.ERROR]
    assert [(line["request_id"], line["exception"]) for line in logged] == [("req-1", "KeyError")]
    assert any("openai.py" in frame for frame in logged[0]["traceback"])
    assert "secret" not in caplog.text


def test_metrics_count_requests_tokens_and_times_by_adapter(client: openai.OpenAI, server: Any) -> None:
    before = samples(server)
    for _ in range(3):
        client.completions.create(model="red", prompt="abcd", max_tokens=7, extra_body={"ignore_eos": True})
    client.completions.create(model="tiny:soft", prompt="abc", max_tokens=5, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="red", prompt=[260])
    after = samples(server)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert grown("peftkit_requests_total", tenant="", adapter="red", outcome="length") == 3
    assert grown("peftkit_requests_total", tenant="", adapter="soft", outcome="length") == 1
    assert grown("peftkit_requests_total", tenant="", adapter="red", outcome="refused") == 1
    assert grown("peftkit_prompt_tokens_total", tenant="", adapter="red") == 12
    assert grown("peftkit_generation_tokens_total", tenant="", adapter="red") == 21
    assert grown("peftkit_time_to_first_token_seconds_count") == grown("peftkit_queue_seconds_count") == 4
    assert grown("peftkit_time_between_tokens_seconds_count") == 3 * 6 + 4
    assert grown("peftkit_http_answers_total", route="/v1/completions", status="200") == 4
    assert grown("peftkit_steps_total") >= 7
    assert after["peftkit_pages_total", ()] == 512 and after["peftkit_requests_running", ()] == 0
    assert after["peftkit_adapters_resident", ()] >= 2 and after["peftkit_adapters", ()] == 5


def test_the_dashboard_asks_for_metrics_that_there_are(client: openai.OpenAI, server: Any) -> None:
    client.completions.create(model="red", prompt="a", max_tokens=2)
    text = httpx.get(f"{server.url}/metrics").text
    families = {family.name for family in text_string_to_metric_families(text)}
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"peftkit_[a-z_]+", target["expr"])
    }
    assert len(asked) > 15
    assert {re.sub("_(total|bucket)$", "", name) for name in asked} <= families


def test_routers_that_know_vllm_see_which_adapters_run_and_wait(client: openai.OpenAI, server: Any) -> None:
    fields: dict[str, Any] = {"prompt": "a", "max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(model=model, **fields) for model in ("red", "soft", "tiny")]
    (name, labels), value = next(item for item in samples(server).items() if item[0][0].startswith("vllm:"))
    assert name == "vllm:lora_requests_info"
    assert dict(labels) == {"max_lora": "4", "running_lora_adapters": "red,soft", "waiting_lora_adapters": ""}
    assert abs(value - time.time()) < 60
    for stream in streams:
        stream.close()


def test_names_of_adapters_are_bounded_as_labels(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peftkit_serve.http.metrics.MAX_ADAPTER_LABELS", 0)
    with server.service.metrics.track("", "one-too-many") as track:
        track.outcome = "stop"
    names = {dict(labels).get("adapter") for _, labels in samples(server)}
    assert "other" in names and "one-too-many" not in names


def test_every_route_is_in_the_openapi_page_with_its_answers(server: Any) -> None:
    page = httpx.get(f"{server.url}/openapi.json").json()
    paths = {path: set(methods) for path, methods in page["paths"].items()}
    assert paths == {
        "/v1/chat/completions": {"post"},
        "/v1/completions": {"post"},
        "/v1/models": {"get"},
        "/v1/models/{model}": {"get"},
        "/v1/adapters": {"get", "post"},
        "/v1/adapters/{name}": {"get", "delete"},
        "/v1/adapters/{name}/aliases": {"post"},
        "/v1/adapters/{name}/rollback": {"post"},
        "/v1/load_lora_adapter": {"post"},
        "/v1/unload_lora_adapter": {"post"},
        "/v1/tenants": {"get", "post"},
        "/v1/tenants/{name}": {"get", "patch", "delete"},
        "/v1/tenants/{name}/keys": {"get", "post"},
        "/v1/tenants/{name}/keys/{key_id}": {"delete"},
        "/health": {"get"},
        "/ready": {"get"},
        "/metrics": {"get"},
    }
    assert httpx.get(f"{server.url}/docs").status_code == 200
    for path, operations in page["paths"].items():
        for operation in operations.values():
            assert operation["description"] and "422" not in operation["responses"], path
            if path.startswith("/v1"):
                assert {"4XX", "5XX"} < set(operation["responses"])
    for name in ("ChatRequest", "CompletionRequest"):
        properties = page["components"]["schemas"][name]["properties"]
        assert {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"} <= set(
            properties
        )
        assert properties["temperature"]["description"]
    events = page["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(events) == {"application/json", "text/event-stream"}


def test_a_request_is_one_line_of_log_that_holds_no_prompt(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "peftkit_serve"):
        client.completions.create(model="red", prompt="a hidden word", max_tokens=3, extra_body={"ignore_eos": True})
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hidden"}], max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="red", prompt="hidden", max_tokens=3, extra_body={"hidden": "hidden"})

        def logged() -> list[Any]:
            return [record.msg for record in caplog.records if record.name == "peftkit_serve.http.guard"]

        deadline = time.monotonic() + 5
        while len(logged()) < 3 and time.monotonic() < deadline:  # a line follows its answer
            time.sleep(0.01)
    lines = logged()
    assert len(lines) == 3
    first = lines[0]
    assert first["path"] == "/v1/completions" and first["status"] == 200 and first["model"] == "red"
    assert (first["prompt_tokens"], first["completion_tokens"], first["outcome"]) == (13, 3, "length")
    assert first["ms"] > 0 and lines[2]["status"] == 400
    assert "hidden" not in caplog.text


def test_every_answer_has_a_request_id_and_a_clean_one_is_taken_over(server: Any) -> None:
    def given(value: str) -> str:
        return httpx.get(f"{server.url}/health", headers={"x-request-id": value}).headers["x-request-id"]

    assert given("abc-1.2_3") == "abc-1.2_3"
    for bad in ("a b", "x" * 129, '{"a": 1}'):
        assert re.fullmatch("[0-9a-f]{32}", given(bad))


def test_a_slash_too_many_is_the_same_resource_and_never_a_redirect(server: Any) -> None:
    text = {"model": "tiny", "prompt": "abc", "max_tokens": 1}
    for method, path, body, status in (
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/tiny", None, 200),
        ("POST", "/v1/completions", text, 200),
        ("POST", "/v1/chat/completions", {"model": "tiny", "messages": HELLO, "max_tokens": 1}, 200),
        ("GET", "/v1/adapters", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/console", None, 200),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
    ):
        for slashes in ("", "/", "//"):
            answer = httpx.request(method, f"{server.url}{path}{slashes}", json=body)
            assert answer.status_code == status and "location" not in answer.headers, answer.text
            assert status == 200 or answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/nothing", "/openapi.json", "/health", "/redoc", "/console", "/docs"]
)
def test_every_answer_tells_a_browser_to_trust_nothing_else(server: Any, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}")
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
    policy = answer.headers.get_list("content-security-policy")
    assert len(policy) == 1 and policy[0].startswith("default-src 'none'")
    page = path in ("/console", "/docs")
    assert answer.headers["cache-control"] == ("no-cache" if page else "no-store")
    assert not page or "://" not in answer.text


def test_log_lines_are_json_without_the_messages_of_exceptions() -> None:
    def line(message: object, *arguments: object, fails: bool = False) -> dict[str, Any]:
        try:
            raise ValueError("a secret prompt")
        except ValueError:
            caught = sys.exc_info() if fails else None
        record = logging.LogRecord("some.logger", logging.WARNING, __file__, 1, message, arguments, caught)
        text = JsonLines().format(record)
        assert "\n" not in text
        return json.loads(text)

    assert line({"request_id": "r", "ms": 1.5}).items() >= {"request_id": "r", "ms": 1.5, "level": "warning"}.items()
    assert line("%d of\n%s", 3, "it")["message"] == "3 of\nit"
    failed = line("a step failed", fails=True)
    assert failed["exception"] == "ValueError" and "secret" not in json.dumps(failed)
    assert "test_operations.py" in failed["traceback"][0]
