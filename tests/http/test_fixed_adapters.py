"""Adapters that the server was started with: shown, served, and kept from what is changed over HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

FILES = ("adapter_config.json", "adapter_model.safetensors", "peftkit.json")
Folders = dict[str, Path]


def upload(server: Any, name: str, folder: Path) -> httpx.Response:
    files = [("files", (file, (folder / file).read_bytes())) for file in FILES]
    return httpx.post(f"{server.url}/v1/adapters", data={"name": name}, files=files, timeout=30)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"]
    return error


def ask(server: Any, model: str) -> str:
    body = {"model": model, "prompt": "abcdef", "max_tokens": 16, "seed": 1, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def names(server: Any) -> list[str]:
    return [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]


def test_adapters_that_the_server_was_started_with_are_shown_and_stay(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: Folders, tmp_path: Path
) -> None:
    engine = make_engine()
    for name in ("soft", "own"):
        engine.adapters.add(name, adapter_folders[name])
    with serve(engine, store=tmp_path / "store") as server:
        upload(server, "red", adapter_folders["red"])
        url = f"{server.url}/v1/adapters"
        shown = {one["name"]: one for one in httpx.get(url).json()["data"]}
        assert list(shown) == ["own", "red", "soft"]
        assert {name: one["fixed"] for name, one in shown.items()} == {"own": True, "red": False, "soft": True}
        (card,) = shown["soft"]["versions"]
        assert (card["method"], card["num_virtual"], card["weight"], card["tier"]) == ("prompt", 20, 1.0, "host")
        ask(server, "soft")
        assert httpx.get(f"{url}/soft").json()["versions"][0]["tier"] == "gpu"
        for answer in (
            httpx.delete(f"{url}/soft"),
            httpx.post(f"{url}/soft/aliases", json={"weights": {"1": 1}}),
            httpx.post(f"{url}/soft/rollback"),
            httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "soft"}),
            upload(server, "soft", adapter_folders["red"]),
        ):
            assert "started with it" in error_of(answer, 409)["message"]
        assert ask(server, "soft")


def test_an_adapter_that_the_server_was_started_with_hides_a_shared_one_of_its_name(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    client: openai.OpenAI,
    adapter_folders: Folders,
    tmp_path: Path,
    database_url: str,
) -> None:
    kept: dict[str, Any] = {"store": tmp_path / "store", "database": database_url}
    with serve(make_engine(), **kept) as server:
        for name in ("red", "tiny2", "other"):
            assert upload(server, name, adapter_folders["blue"]).status_code == 201
    engine = make_engine()
    engine.adapters.add("red", adapter_folders["red"])
    with serve(engine, "tiny2", **kept) as server:
        assert names(server) == ["tiny2", "other", "red"]
        url = f"{server.url}/v1/adapters"
        shown = [(one["name"], one["fixed"]) for one in httpx.get(url).json()["data"]]
        assert shown == [("other", False), ("red", True)]
        assert httpx.get(f"{url}/red").json()["fixed"]
        for model, same in (("red", "red"), ("tiny2", "tiny"), ("tiny2:red", "red"), ("other", "blue")):
            expected = client.completions.create(
                model=same, prompt="abcdef", max_tokens=16, seed=1, extra_body={"ignore_eos": True}
            )
            assert ask(server, model) == expected.choices[0].text
        missing = httpx.post(f"{server.url}/v1/completions", json={"model": "red@1", "prompt": "a"})
        assert error_of(missing, 404)["code"] == "model_not_found"
        error_of(httpx.delete(f"{url}/red"), 409)
        server.wait_idle()
    with serve(make_engine(), **kept) as server:  # without it the shared one is back
        assert names(server) == ["tiny", "other", "red", "tiny2"]
        assert ask(server, "red") == ask(server, "red@1") == ask(server, "other")
