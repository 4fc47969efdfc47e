"""Tenants over HTTP: keys, what each may see and name, limits, and who may administer."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from peftkit_serve.tenants.database import Database

FILES = ("adapter_config.json", "adapter_model.safetensors", "peftkit.json")
OPEN = {"/health", "/ready", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/console", "/console/{file}"}
INFERENCE = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}"}


class Office:
    """A server with an admin key, and what an administrator does there."""

    def __init__(self, server: Any, database_url: str, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.url = database_url
        self.database: Database = server.database
        self.admin = self.database.add_key(None).text
        self.http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {self.admin}"}, timeout=30)

    def tenant(self, name: str, adapters: list[str] | None = None, **limits: Any) -> str:
        """Makes a tenant and returns its key."""
        body = {"name": name, "adapters": ["*"] if adapters is None else adapters, "limits": limits}
        answer = self.http.post("/v1/tenants", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["key"]

    def upload(self, name: str, folder: Path, tenant: str | None = None) -> httpx.Response:
        files = [("files", (file, (folder / file).read_bytes())) for file in FILES]
        return self.http.post(
            "/v1/adapters", data={"name": name, **({"tenant": tenant} if tenant else {})}, files=files
        )

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def office(
    make_engine: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path, database_url: str
) -> Iterator[Office]:
    with serve(make_engine(), store=tmp_path / "store", database=database_url, poll_s=0.05) as server:
        made = Office(server, database_url, tmp_path / "store")
        with made.http:
            yield made
        server.wait_idle()


def say(client: openai.OpenAI, model: str, **fields: Any) -> str:
    fields = {"max_tokens": 12, "seed": 1, "extra_body": {"ignore_eos": True}, **fields}
    return client.completions.create(model=model, prompt="abcdef", **fields).choices[0].text


def test_every_route_asks_for_its_key(office: Office) -> None:
    key = office.tenant("acme")
    routes = {
        (method, route.path)
        for route in office.server.app.routes
        for method in getattr(route, "methods", None) or ()
        if method not in ("HEAD", "OPTIONS")
    }
    routes |= {
        (method.upper(), path)
        for path, methods in httpx.get(f"{office.server.url}/openapi.json").json()["paths"].items()
        for method in methods
    }
    assert len(routes) >= 24
    for method, path in sorted(routes):
        url = office.server.url + re.sub(r"\{[^}]*\}", "x", path)
        status = {
            "nobody": httpx.request(method, url).status_code,
            "tenant": httpx.request(method, url, headers={"authorization": f"Bearer {key}"}).status_code,
            "wrong": httpx.request(method, url, headers={"authorization": f"Bearer {key[:-1]}~"}).status_code,
        }
        if path in OPEN:
            assert 401 not in status.values(), path
        else:
            assert status["nobody"] == status["wrong"] == 401, (method, path)
            assert (status["tenant"] == 401) == (path not in INFERENCE), (method, path)


def test_the_body_of_an_upload_is_not_read_before_its_key(office: Office) -> None:
    office.tenant("acme")

    host, port = office.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/adapters HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            b"Content-Length: 1000000000\r\n\r\n--x\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")


def test_a_missing_and_a_wrong_key_are_told_apart_and_the_header_says_how(office: Office) -> None:
    office.tenant("acme")
    with pytest.raises(openai.AuthenticationError) as wrong:
        say(office.client("sk-wrong"), "tiny")
    assert wrong.value.code == "invalid_api_key" and wrong.value.type == "authentication_error"
    missing = httpx.post(f"{office.server.url}/v1/completions", json={})
    assert missing.status_code == 401 and missing.json()["error"]["code"] == "missing_api_key"
    assert missing.headers["www-authenticate"] == "Bearer"


def test_a_key_is_shown_once(office: Office) -> None:
    key = office.tenant("acme")
    for path in ("/v1/tenants", "/v1/tenants/acme", "/v1/tenants/acme/keys"):
        text = office.http.get(path).text
        assert key not in text and key.split("_", 2)[2] not in text and key.split("_")[1] in text


def test_keys_are_rotated_and_revoked_at_once(office: Office) -> None:
    old = office.tenant("acme")
    made = office.http.post("/v1/tenants/acme/keys").json()
    assert say(office.client(old), "tiny") == say(office.client(made["key"]), "tiny")
    assert office.http.delete(f"/v1/tenants/acme/keys/{old.split('_')[1]}").status_code == 204
    with pytest.raises(openai.AuthenticationError):
        say(office.client(old), "tiny")
    assert say(office.client(made["key"]), "tiny")
    assert office.http.delete("/v1/tenants/acme/keys/000000000000").status_code == 404


def test_an_answer_under_way_outlives_its_key(office: Office) -> None:
    first = office.client(office.tenant("acme"))
    (card,) = office.http.get("/v1/tenants/acme/keys").json()
    fields: dict[str, Any] = {"prompt": "a", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = first.completions.create(model="tiny", stream=True, **fields)
    chunks = [next(iter(stream))]
    assert office.http.delete(f"/v1/tenants/acme/keys/{card['id']}").status_code == 204
    with pytest.raises(openai.AuthenticationError):
        say(first, "tiny")
    chunks.extend(stream)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_key_that_another_process_revokes_ends_within_a_moment(office: Office) -> None:
    key = office.tenant("acme")
    other = Database(office.url)
    other.remove_key("acme", key.split("_")[1])
    other.close()
    deadline = time.monotonic() + 5
    with office.client(key) as client:
        with pytest.raises(openai.AuthenticationError):
            while time.monotonic() < deadline:
                say(client, "tiny", max_tokens=1)


def test_what_another_process_removes_is_freed_when_its_requests_have_ended(
    office: Office, adapter_folders: dict[str, Path]
) -> None:
    key = office.tenant("acme")
    office.upload("own", adapter_folders["red"], "acme")
    content = next((office.folder / "adapters").iterdir()) / "content"
    with office.client(key) as client:
        stream = client.completions.create(
            model="own", prompt="a", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        other = Database(office.url)
        other.remove_tenant("acme")
        other.close()
        while office.server.engine.stats()["adapters"]:
            time.sleep(0.01)
        assert len(list(content.iterdir())) == 1
        stream.close()
    deadline = time.monotonic() + 5
    while list(content.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/adapters", "/v1/tenants"])
def test_a_wrong_key_is_refused_before_the_body_is_read(office: Office, path: str) -> None:
    office.tenant("acme")
    host, port = office.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nobody's\r\n"
            "Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n".encode()
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_another_tenants_adapter_is_as_if_it_were_not_there(office: Office, adapter_folders: dict[str, Path]) -> None:
    keys = {name: office.tenant(name, ["open-*"]) for name in ("acme", "rival")}
    assert office.upload("own", adapter_folders["red"], "acme").status_code == 201
    assert office.upload("open-1", adapter_folders["blue"]).status_code == 201
    assert office.upload("closed", adapter_folders["blue"]).status_code == 201
    acme, rival = office.client(keys["acme"]), office.client(keys["rival"])
    assert [card.id for card in acme.models.list()] == ["tiny", "open-1", "own"]
    assert [card.id for card in rival.models.list()] == ["tiny", "open-1"]
    for name in ("own", "own@1", "tiny:own", "closed", "oown", "acme/own"):
        messages: set[str] = set()
        for model in (name, name.replace("own", "nwo").replace("closed", "dlosec")):
            for call in (lambda m=model: say(rival, m), lambda m=model: rival.models.retrieve(m)):
                with pytest.raises(openai.NotFoundError) as caught:
                    call()
                assert caught.value.code == "model_not_found"
                messages.add(caught.value.message.replace(model, "…"))
        hints = {hint for message in messages for hint in re.findall("did you mean '(.*)'", message)}
        assert hints <= {"tiny", "open-1"}, "a hint tells of another tenant's adapter"
    assert say(acme, "own") == say(acme, "own@1") and say(acme, "open-1") == say(rival, "open-1")


def test_two_tenants_use_one_name_for_their_own(office: Office, adapter_folders: dict[str, Path]) -> None:
    keys = {name: office.tenant(name) for name in ("acme", "rival")}
    for tenant, folder in (("acme", "red"), ("rival", "blue"), (None, "soft")):
        assert office.upload("mine", adapter_folders[folder], tenant).json()["version"] == 1
    texts = {say(office.client(key), "mine") for key in (*keys.values(), office.admin)}
    assert len(texts) == 3
    assert office.http.delete("/v1/adapters/mine?tenant=acme").status_code == 200
    assert say(office.client(keys["acme"]), "mine") == say(office.client(office.admin), "mine")
    assert office.http.get("/v1/adapters?tenant=acme").json()["data"] == []
    assert office.http.get("/v1/adapters?tenant=nobody").status_code == 404


@pytest.mark.parametrize("route", ["upload", "json", "vllm"])
def test_the_tenant_of_a_new_adapter_may_stand_in_the_query(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    tmp_path: Path,
    database_url: str,
    adapter_folders: dict[str, Path],
    route: str,
) -> None:
    folder = adapter_folders["red"]

    def post(office: Office, query: dict[str, str], **named: str) -> httpx.Response:
        path = "/v1/load_lora_adapter" if route == "vllm" else "/v1/adapters"
        if route == "upload":
            files = [("files", (file, (folder / file).read_bytes())) for file in FILES]
            return office.http.post(path, params=query, data={"name": "red", **named}, files=files)
        body = (
            {"lora_name": "red", "lora_path": str(folder)} if route == "vllm" else {"name": "red", "path": str(folder)}
        )
        return office.http.post(path, params=query, json={**body, **named})

    with serve(make_engine(), store=tmp_path, database=database_url, adapter_roots=(folder.parent,)) as server:
        office = Office(server, database_url, tmp_path)
        acme, rival = office.client(office.tenant("acme")), office.client(office.tenant("rival"))
        for name in ("nobody", ""):
            refused = post(office, {"tenant": name})
            assert refused.status_code == 404 and refused.json()["error"]["param"] == "tenant"
        if route != "vllm":
            for given in ("rival", ""):
                differ = post(office, {"tenant": "acme"}, tenant=given)
                assert differ.status_code == 400 and differ.json()["error"]["param"] == "tenant"
            assert post(office, {}, tenant="").status_code == 404
        assert office.http.get("/v1/adapters").json()["data"] == []
        made = post(office, {"tenant": "acme"})
        assert made.status_code in (200, 201), made.text
        if route != "vllm":
            assert made.json()["tenant"] == "acme"
            assert post(office, {"tenant": "acme"}, tenant="acme").status_code == 201
        assert office.http.get("/v1/adapters").json()["data"] == []
        assert say(acme, "red")
        with pytest.raises(openai.NotFoundError):
            say(rival, "red")
        if route == "vllm":
            assert post(office, {"tenant": "acme"}).status_code == 400, "it is loaded already"
            gone = office.http.post("/v1/unload_lora_adapter", params={"tenant": "acme"}, json={"lora_name": "red"})
            assert gone.status_code == 200
            with pytest.raises(openai.NotFoundError):
                say(acme, "red")
        office.http.close()


def test_nobodys_adapter_is_called_as_the_base(
    office: Office,
    adapter_folders: dict[str, Path],
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
) -> None:
    key = office.tenant("acme")
    for tenant in (None, "acme"):
        refused = office.upload("tiny", adapter_folders["red"], tenant)
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "name_taken"
    assert office.upload("mine", adapter_folders["red"], "acme").status_code == 201
    with serve(make_engine(), "mine", store=office.folder, database=office.url) as renamed:
        headers = {"authorization": f"Bearer {key}"}
        listed = httpx.get(f"{renamed.url}/v1/models", headers=headers).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [("mine", "mine")]
        admin = {"authorization": f"Bearer {office.admin}"}
        gone = httpx.delete(f"{renamed.url}/v1/adapters/mine", params={"tenant": "acme"}, headers=admin, timeout=30)
        assert gone.status_code == 200, "one from before can still be removed"


def test_a_removed_tenant_is_gone_with_its_keys_and_adapters(office: Office, adapter_folders: dict[str, Path]) -> None:
    key = office.tenant("acme")
    office.tenant("rival")
    office.upload("own", adapter_folders["red"], "acme")
    assert office.http.delete("/v1/tenants/acme").status_code == 204
    with pytest.raises(openai.AuthenticationError):
        say(office.client(key), "tiny")
    assert office.server.engine.stats()["adapters"] == 0
    assert office.http.get("/v1/tenants/acme").status_code == 404
    assert [one["name"] for one in office.http.get("/v1/tenants").json()["data"]] == ["rival"]


def test_quotas_of_adapters_are_413_and_names_in_use_409(office: Office, adapter_folders: dict[str, Path]) -> None:
    office.tenant("acme", max_adapters=1)
    assert office.upload("a", adapter_folders["red"], "acme").status_code == 201
    refused = office.upload("b", adapter_folders["blue"], "acme")
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "quota_exceeded"
    assert office.server.engine.stats()["adapters"] == 1, "what was refused stays in memory"
    changed = office.http.patch("/v1/tenants/acme", json={"limits": {"max_adapters": 2, "max_adapter_bytes": 10}})
    assert changed.json()["limits"]["max_adapters"] == 2
    assert office.upload("b", adapter_folders["blue"], "acme").status_code == 413
    again = office.http.post("/v1/tenants", json={"name": "acme"})
    assert again.status_code == 409 and again.json()["error"]["code"] == "name_taken"
    weightless = {"name": "x", "limits": {"weight": 0}}
    wrong = [({"name": ".."}, "name"), ({"name": "a/b"}, "name"), (weightless, "limits.weight")]
    for body, param in wrong:
        bad = office.http.post("/v1/tenants", json=body)
        assert bad.status_code == 400 and bad.json()["error"]["param"] == param
    bad = office.http.patch("/v1/tenants/acme", json={"limits": {"speed": 1}})
    assert bad.status_code == 400 and "speed" in bad.json()["error"]["message"]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_minute": 2}, "requests_limit_exceeded"),
        ({"tokens_per_minute": 40}, "tokens_limit_exceeded"),
    ],
)
def test_a_rate_is_kept_and_says_when_to_come_again(office: Office, limits: dict[str, int], code: str) -> None:
    limited, free = office.client(office.tenant("acme", **limits)), office.client(office.tenant("rival"))
    for _ in range(2):
        say(limited, "tiny", max_tokens=20)
    with pytest.raises(openai.RateLimitError) as caught:
        say(limited, "tiny")
    assert caught.value.code == code and caught.value.type == "rate_limit_error"
    wait_s = int(caught.value.response.headers["retry-after"])
    assert 15 <= wait_s <= 31 if "requests_per_minute" in limits else 1 <= wait_s <= 60
    assert say(free, "tiny")
    office.http.patch("/v1/tenants/acme", json={"limits": {name: 10**6 for name in limits}})
    time.sleep(0.02)
    assert say(limited, "tiny"), "a raised limit holds at once"


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 5}, {"requests_per_minute": 1, "max_concurrency": 2}]
)
def test_what_is_refused_takes_nothing_of_a_rate(office: Office, limits: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {office.tenant('acme', **limits)}"}
    good: dict[str, Any] = {"model": "tiny", "prompt": "abcde", "max_tokens": 1}

    def status(**fields: Any) -> int:
        return httpx.post(f"{office.server.url}/v1/completions", json=good | fields, headers=headers).status_code

    for stream in (False, True):
        assert status(temperature=9, stream=stream) == 400
        assert status(prompt=[1, 2, 260], stream=stream) == 400, "the engine's refusal, behind the rates"
        assert status(logit_bias={"260": 1}, stream=stream) == 400
        assert status(prompt="x" * 5000, stream=stream) == 400
        assert status(model="none", stream=stream) == 404
        if "max_concurrency" in limits:
            assert status(n=3, stream=stream) == 400
    assert status() == 200
    assert status() == 429


def test_a_prompt_counts_once_however_many_answers_it_has(office: Office) -> None:
    acme = office.client(office.tenant("acme", tokens_per_minute=24))
    answer = acme.completions.create(model="tiny", prompt=["abc", "abc"], n=3, max_tokens=1)
    assert answer.usage is not None and answer.usage.total_tokens == 12
    assert acme.completions.create(model="tiny", prompt="x" * 11, max_tokens=1).choices
    with pytest.raises(openai.RateLimitError):
        acme.completions.create(model="tiny", prompt="x" * 20, max_tokens=1)


def test_concurrency_and_queue_are_bounded_for_each_tenant(office: Office) -> None:
    acme, rival = office.client(office.tenant("acme", max_concurrency=2)), office.client(office.tenant("rival"))
    fields: dict[str, Any] = {"prompt": "a", "max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [acme.completions.create(model="tiny", **fields) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        say(acme, "tiny")
    assert caught.value.code == "concurrency_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError):
        acme.completions.create(model="tiny", prompt=["a"] * 2, max_tokens=1)
    assert say(rival, "tiny")
    card = office.http.get("/v1/tenants/acme").json()
    assert (card["running"], card["waiting"]) == (2, 0)
    for stream in streams:
        stream.close()
    office.server.wait_idle()
    deadline = time.monotonic() + 5
    while office.http.get("/v1/tenants/acme").json()["running"]:
        assert time.monotonic() < deadline
    assert say(acme, "tiny")


@pytest.mark.parametrize("limit", ["max_concurrency", "max_queue"])
def test_more_answers_than_a_limit_can_ever_allow_are_400_and_name_n(office: Office, limit: str) -> None:
    acme = office.client(office.tenant("acme", **{"adapters": None, limit: 2}))
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
    for stream in (False, True):
        for prompt, n in (("a", 3), (["a"] * 3, 1), (["a", "b"], 2)):
            with pytest.raises(openai.BadRequestError) as caught:
                acme.completions.create(**fields, prompt=prompt, n=n, stream=stream)
            assert caught.value.param == "n" and "retry-after" not in caught.value.response.headers
    with pytest.raises(openai.BadRequestError):
        acme.chat.completions.create(**fields, messages=[{"role": "user", "content": "a"}], n=3)
    assert len(acme.completions.create(**fields, prompt="a", n=2).choices) == 2


@pytest.mark.parametrize("weight", [0, 0.0009, 1e-320, 1001])
def test_a_weight_that_is_none_is_refused(office: Office, weight: float) -> None:
    made = office.http.post("/v1/tenants", json={"name": "acme", "limits": {"weight": weight}})
    assert made.status_code == 400 and made.json()["error"]["param"] == "limits.weight"
    office.tenant("acme", weight=0.001)
    changed = office.http.patch("/v1/tenants/acme", json={"limits": {"weight": weight}})
    assert changed.status_code == 400 and changed.json()["error"]["param"] == "weight"


def test_metrics_need_the_admin_key_and_count_by_tenant(office: Office) -> None:
    say(office.client(office.tenant("acme")), "tiny")
    text = office.http.get("/metrics").text
    assert 'peftkit_requests_total{adapter="tiny",outcome="length",tenant="acme"} 1.0' in text
    assert httpx.get(f"{office.server.url}/metrics").status_code == 401


def test_what_is_kept_of_a_prompt_is_shared_within_a_tenant_alone(office: Office) -> None:
    acme, rival = office.client(office.tenant("acme")), office.client(office.tenant("rival"))

    def cached(client: openai.OpenAI) -> int:
        before = office.server.engine.stats()["cached_tokens"]
        client.completions.create(model="tiny", prompt=list(range(1, 101)), max_tokens=1)
        office.server.wait_idle()
        return office.server.engine.stats()["cached_tokens"] - before

    assert cached(acme) == 0 and cached(acme) >= 80
    assert cached(rival) == 0 and cached(rival) >= 80
    assert cached(office.client(office.admin)) == 0
    assert "peftkit_cached_tokens_total 192.0" in office.http.get("/metrics").text


def test_without_any_key_only_this_machines_own_pages_administer(
    make_engine: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    with serve(make_engine()) as server:
        url, host = f"{server.url}/v1/tenants", server.url.removeprefix("http://")
        assert httpx.get(url).status_code == 200
        assert httpx.get(url, headers={"origin": f"http://{host}"}).status_code == 200
        for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"host": "evil.example"}):
            assert httpx.get(url, headers=headers).status_code == 401
    with serve(make_engine(), open_admin=False) as server:
        assert httpx.get(f"{server.url}/v1/tenants").status_code == 401
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
    with serve(make_engine(), open_admin=False, require_key=True) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


def test_no_key_is_ever_logged(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        key = office.tenant("acme")
        say(office.client(key), "tiny")
        with pytest.raises(openai.AuthenticationError):
            say(office.client(key[:-1] + "~"), "tiny")
        deadline = time.monotonic() + 5
        while "'status': 401" not in caplog.text:  # a line is written after its answer
            assert time.monotonic() < deadline
    ours = "".join(str(record.msg) for record in caplog.records if record.name.startswith("peftkit"))
    assert "acme" in ours and key.split("_", 2)[2][:-1] not in ours and office.admin.split("_", 2)[2] not in ours
