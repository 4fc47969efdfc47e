"""Adapters over HTTP: validated before they are seen, versioned, shared out, rolled back and removed with a drain."""

import io
import json
import struct
import tarfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

FILES = ("adapter_config.json", "adapter_model.safetensors", "peftkit.json")
Folders = dict[str, Path]


@pytest.fixture
def served(
    make_engine: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path, database_url: str
) -> Iterator[Any]:
    """A server of its own with an empty store, and roots for adapters by path."""
    (tmp_path / "root").mkdir()
    settings = {
        "store": tmp_path / "store",
        "database": database_url,
        "adapter_roots": (tmp_path / "root",),
        "max_upload_bytes": 2**20,
    }
    with serve(make_engine(), **settings) as server:
        yield server
        server.wait_idle()


def parts(folder: Path) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (name, (folder / name).read_bytes())) for name in FILES if (folder / name).exists()]


def upload(server: Any, name: str, folder: Path, **fields: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/adapters", data={"name": name, **fields}, files=parts(folder), timeout=30)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"]
    return error


def ask(server: Any, model: str, **fields: Any) -> str:
    body = {"model": model, "prompt": "abcdef", "max_tokens": 16, "seed": 1, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def names(server: Any) -> list[str]:
    return [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]


def test_an_upload_answers_as_the_same_folder_given_at_the_start(
    served: Any, client: openai.OpenAI, adapter_folders: Folders
) -> None:
    for name in ("red", "soft"):
        answer = upload(served, name, adapter_folders[name])
        assert answer.status_code == 201, answer.text
        card = answer.json()
        assert (card["name"], card["version"], card["tenant"], card["weight"]) == (name, 1, None, 1.0)
        assert len(card["uid"]) == 64 and card["bytes"] > 1000 and card["load_ms"] > 0
        expected = client.completions.create(
            model=name, prompt="abcdef", max_tokens=16, seed=1, extra_body={"ignore_eos": True}
        )
        assert ask(served, name) == ask(served, f"{name}@1") == ask(served, f"tiny:{name}") == expected.choices[0].text
    assert names(served) == ["tiny", "red", "soft"]
    card = httpx.get(f"{served.url}/v1/adapters/red").json()["versions"][0]
    assert card["method"] == "lora" and card["rank"] == 4 and card["tier"] == "gpu" and card["references"] == 0
    assert time.time() - card["last_use"] < 60
    assert [one["name"] for one in httpx.get(f"{served.url}/v1/adapters").json()["data"]] == ["red", "soft"]


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_an_archive_is_as_good_as_its_files(served: Any, adapter_folders: Folders, kind: str) -> None:
    packed = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for _, (name, content) in parts(adapter_folders["red"]):
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=packed, mode="w:gz" if kind == "tar.gz" else "w") as archive:
            archive.add(adapter_folders["red"], arcname=".")
    files = {"files": (f"red.{kind}", packed.getvalue())}
    answer = httpx.post(f"{served.url}/v1/adapters", data={"name": "packed"}, files=files)
    assert answer.status_code == 201, answer.text
    upload(served, "plain", adapter_folders["red"])
    assert ask(served, "packed") == ask(served, "plain")


def tar_of(*members: tarfile.TarInfo) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return packed.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_model.safetensors", bytes(2**24))
    return packed.getvalue()


def damaged(how: int) -> bytes:
    """A zip that is whole but for the packed bytes of its file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", how) as archive:
        archive.writestr("adapter_config.json", json.dumps({str(number): number for number in range(300)}))
    content = bytearray(packed.getvalue())
    start = 30 + len("adapter_config.json")
    content[start : start + 200] = b"\xff" * 200
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "status"),
    [
        *(("a.zip", damaged(how), 400) for how in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
        ("a.tar", tar_of(member("../adapter_config.json")), 400),
        ("a.tar", tar_of(member("/etc/passwd")), 400),
        ("a.tar", tar_of(member("adapter_config.json", tarfile.SYMTYPE, "/etc/passwd")), 400),
        ("a.tar", tar_of(member("adapter_config.json", tarfile.LNKTYPE, "x")), 400),
        ("a.tar", tar_of(member("adapter_config.json", tarfile.CHRTYPE)), 400),
        ("a.tar", tar_of(member("adapter_config.json", size=3), member("adapter_config.json", size=3)), 400),
        ("a.tar", tar_of(member("a/b/adapter_config.json")), 400),
        ("a.tar", b"no archive", 400),
        ("a.zip", b"no archive", 400),
        ("a.tar.gz", b"\x1f\x8b no archive", 400),
        ("a.zip", bomb(), 413),
        ("evil.py", b"x", 400),
        ("../adapter_config.json", b"{}", 400),
        ("adapter_config.json", b"{", 400),
        ("adapter_config.json", b"[" * 50_000, 400),
        ("adapter_config.json", b" " * (2**20 - 10), 400),
        ("peftkit.json", b"{", 400),
        ("adapter_model.safetensors", struct.pack("<Q", 2**60) + b"{}", 400),
        ("adapter_model.safetensors", b"", 400),
        ("adapter_model.bin", b"\x80\x04", 400),
    ],
    ids=range(23),
)
def test_files_that_are_no_adapter_are_refused_and_leave_nothing(
    served: Any, tmp_path: Path, name: str, content: bytes, status: int
) -> None:
    answer = httpx.post(f"{served.url}/v1/adapters", data={"name": "bad"}, files={"files": (name, content)})
    error = error_of(answer, status)
    assert str(tmp_path) not in error["message"] and len(answer.text) < 1500
    assert names(served) == ["tiny"]
    left = [path for path in (tmp_path / "store" / "adapters").rglob("*") if path.is_file()]
    assert left == []


def rewritten(folder: Path, to: Path, **fields: Any) -> Path:
    to.mkdir(parents=True)
    for name in FILES:
        (to / name).write_bytes((folder / name).read_bytes())
    config = json.loads((to / "adapter_config.json").read_text()) | fields
    (to / "adapter_config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"r": 5}, 400, "lora"),
        ({"target_modules": ["nothing_here"]}, 400, "nothing_here"),
        ({"peft_type": "IA3"}, 422, "IA3"),
        ({"an_unknown_field": 7}, 422, "an_unknown_field"),
    ],
)
def test_an_adapter_that_cant_be_served_faithfully_is_refused_with_the_reason(
    served: Any, adapter_folders: Folders, tmp_path: Path, fields: dict[str, Any], status: int, said: str
) -> None:
    upload(served, "a", adapter_folders["red"])
    before = ask(served, "a")
    answer = upload(served, "a", rewritten(adapter_folders["red"], tmp_path / "bad", **fields))
    assert said.lower() in error_of(answer, status)["message"].lower()
    assert [one["version"] for one in httpx.get(f"{served.url}/v1/adapters/a").json()["versions"]] == [1]
    assert ask(served, "a") == before


def test_an_adapter_too_large_to_be_served_is_413_and_leaves_nothing(
    served: Any, write_prompt: Callable[..., Path], tmp_path: Path
) -> None:
    large = write_prompt(tmp_path / "large", 1, num_virtual=2100)
    message = error_of(upload(served, "a", large), 413)["message"]
    assert "2100 virtual tokens" in message and str(tmp_path) not in message and "content" not in message
    assert names(served) == ["tiny"] and not list((tmp_path / "store").glob("adapters/*/*/*"))


@pytest.mark.parametrize("name", [".", "..", "...", "a/b", "é", "x" * 129, "a b"])
def test_a_name_that_is_none_is_refused(served: Any, adapter_folders: Folders, name: str) -> None:
    assert error_of(upload(served, name, adapter_folders["red"]), 400)["param"] == "name"


def test_what_is_missing_from_an_upload_is_named(served: Any, adapter_folders: Folders) -> None:
    url = f"{served.url}/v1/adapters"
    assert error_of(httpx.post(url, files=parts(adapter_folders["red"])), 400)["param"] == "name"
    only_name = httpx.post(url, files={"name": (None, "a")})
    assert error_of(only_name, 400)["param"] == "files"
    odd = httpx.post(url, data={"name": "a", "colour": "b"}, files=parts(adapter_folders["red"]))
    assert error_of(odd, 400)["param"] == "colour"
    assert error_of(upload(served, "a", adapter_folders["red"], tenant="nobody"), 404)["param"] == "tenant"
    for content in (b"{", b"[]", b'{"name": "a", "path": "x", "path": "y"}'):
        error_of(httpx.post(url, content=content, headers={"content-type": "application/json"}), 400)
    for body, field in (({"name": "a"}, "path"), ({"name": "a", "path": 1}, "path"), ({"path": "x"}, "name")):
        error = error_of(httpx.post(url, json=body), 400)
        assert error["param"] == field and error["message"].startswith(field)
    broken = httpx.post(url, content=b"nonsense", headers={"content-type": "multipart/form-data; boundary=x"})
    error_of(broken, 400)


def test_an_upload_over_the_limit_is_413_declared_or_not(served: Any) -> None:
    large = bytes(2**20 + 2**18)
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="adapter_model.safetensors"\r\n\r\n' + large
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for content in (body, iter([body])):
        error_of(httpx.post(f"{served.url}/v1/adapters", content=content, headers=headers), 413)


def test_a_new_version_takes_over_while_running_requests_finish_on_theirs(
    served: Any, adapter_folders: Folders
) -> None:
    upload(served, "a", adapter_folders["red"])
    alone = ask(served, "a", max_tokens=300)
    answers: list[str] = []
    running = threading.Thread(target=lambda: answers.append(ask(served, "a", max_tokens=300)))
    running.start()
    while not served.engine.stats()["requests_running"]:
        time.sleep(0.001)
    assert upload(served, "a", adapter_folders["blue"]).json()["version"] == 2
    second = ask(served, "a")
    running.join()
    assert answers == [alone], "a running request met the new version"
    assert second == ask(served, "a@2") != ask(served, "a@1")
    assert ask(served, "a@1", max_tokens=300) == alone
    weights = [(one["version"], one["weight"]) for one in httpx.get(f"{served.url}/v1/adapters/a").json()["versions"]]
    assert weights == [(1, 0.0), (2, 1.0)]


def test_a_canary_gets_its_share_and_rollback_takes_it_back(served: Any, adapter_folders: Folders) -> None:
    for name in ("red", "blue"):
        upload(served, "a", adapter_folders[name])
    texts = {number: ask(served, f"a@{number}", max_tokens=6) for number in (1, 2)}
    assert texts[1] != texts[2]
    url = f"{served.url}/v1/adapters/a"
    card = httpx.post(f"{url}/aliases", json={"weights": {"1": 3, "2": 1}}).json()
    assert {one["version"]: one["weight"] for one in card["versions"]} == {1: 0.75, 2: 0.25}
    with httpx.Client(base_url=served.url) as connection:
        body = {"model": "a", "prompt": "abcdef", "max_tokens": 6, "seed": 1, "ignore_eos": True}
        seen = Counter(connection.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(60))
    assert set(seen) == set(texts.values())
    assert abs(seen[texts[1]] - 45) < 6 * (60 * 0.75 * 0.25) ** 0.5, "six standard deviations"
    assert httpx.post(f"{url}/rollback").status_code == 200
    assert {ask(served, "a", max_tokens=6) for _ in range(4)} == {texts[2]}
    assert httpx.post(f"{url}/rollback").status_code == 200
    assert {ask(served, "a", max_tokens=6) for _ in range(4)} == {texts[1]}
    assert error_of(httpx.post(f"{url}/rollback"), 400)["param"] == "name"


@pytest.mark.parametrize(
    ("weights", "status"),
    [
        ({}, 400),
        ({"9": 1}, 404),
        ({"1": 0}, 400),
        ({"1": -1}, 400),
        ({"x": 1}, 400),
        ({"1": 1e308, "2": 1e308}, 400),
        ({"1": 1e6 + 1}, 400),
        ({"1": 1e6, "2": 5e-324}, 400),
    ],
)
def test_weights_that_are_none_are_refused(
    served: Any, adapter_folders: Folders, weights: dict[str, float], status: int
) -> None:
    for name in ("red", "blue"):
        upload(served, "a", adapter_folders[name])
    answer = httpx.post(f"{served.url}/v1/adapters/a/aliases", json={"weights": weights})
    assert error_of(answer, status)["param"].startswith("weights")
    assert names(served) == ["tiny", "a"]
    error_of(httpx.post(f"{served.url}/v1/adapters/none/aliases", json={"weights": {"1": 1}}), 404)


def test_removal_waits_for_running_requests_then_frees_memory_and_disk(
    served: Any, adapter_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(served, "a", adapter_folders["red"])
    allowed, taken, step = threading.Semaphore(5), threading.Semaphore(0), served.engine.step

    def held() -> Any:
        assert allowed.acquire(timeout=60)
        taken.release()
        return step()

    monkeypatch.setattr(served.engine, "step", held)
    body = {"model": "a", "prompt": "a", "max_tokens": 600, "stream": True, "ignore_eos": True, "seed": 2}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        removing: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: removing.append(httpx.delete(f"{served.url}/v1/adapters/a", timeout=60))
        )
        thread.start()
        while "a" in names(served):
            time.sleep(0.002)
        text = httpx.post(f"{served.url}/v1/completions", json={"model": "a", "prompt": "x"})
        assert error_of(text, 404)["code"] == "model_not_found"
        allowed.release(20)
        for _ in range(25):
            assert taken.acquire(timeout=60)
        thread.join(0.05)
        assert not removing, "it was removed under a running request"
        allowed.release(600)
        assert list(lines)[-2] == "data: [DONE]"
    thread.join()
    assert removing[0].status_code == 200 and removing[0].json()["freed_bytes"] > 1000
    assert served.engine.stats()["adapters"] == 0
    assert [path for path in (tmp_path / "store" / "adapters").rglob("*") if path.is_file()] == []
    error_of(httpx.delete(f"{served.url}/v1/adapters/a"), 404)
    assert upload(served, "a", adapter_folders["red"]).json()["version"] == 2


def test_one_version_is_removed_alone_and_content_in_use_stays(served: Any, adapter_folders: Folders) -> None:
    for name in ("red", "blue"):
        upload(served, "a", adapter_folders[name])
    upload(served, "b", adapter_folders["red"])
    error_of(httpx.delete(f"{served.url}/v1/adapters/a@2"), 400)
    before = ask(served, "b")
    assert httpx.delete(f"{served.url}/v1/adapters/a@1").json() == {"name": "a", "version": 1, "freed_bytes": 0}
    assert ask(served, "b") == before
    for gone in ("a@1", "a@9", "a@x", "a@01", "none"):
        error_of(httpx.delete(f"{served.url}/v1/adapters/{gone}"), 404)
    assert httpx.post(f"{served.url}/v1/completions", json={"model": "a@1", "prompt": "x"}).status_code == 404


def test_a_folder_under_a_root_is_registered_and_one_outside_looks_absent(
    served: Any, adapter_folders: Folders, tmp_path: Path
) -> None:
    inside = rewritten(adapter_folders["red"], tmp_path / "root" / "inside")
    url = f"{served.url}/v1/adapters"
    assert httpx.post(url, json={"name": "a", "path": str(inside)}).status_code == 201
    first = ask(served, "a")
    (inside / "adapter_config.json").write_text("{}")
    assert ask(served, "a") == first, "a version changed with the folder that it came from"
    (tmp_path / "root" / "link").symlink_to(adapter_folders["red"])
    linked = rewritten(adapter_folders["red"], tmp_path / "root" / "linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(adapter_folders["red"] / "adapter_model.safetensors")
    messages = {
        error_of(httpx.post(url, json={"name": "b", "path": path}), 400)["message"]
        for path in (str(adapter_folders["red"]), "/etc", "/no/such", f"{inside}/../../x", f"{inside}/../link", "\0")
    }
    assert len(messages) == 1, "what lies outside can be told apart"
    error_of(httpx.post(url, json={"name": "b", "path": str(linked)}), 400)


def test_vllms_bodies_load_and_unload(served: Any, adapter_folders: Folders, tmp_path: Path) -> None:
    for name in ("red", "blue"):
        rewritten(adapter_folders[name], tmp_path / "root" / name)

    def post(route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{served.url}/v1/{route}", json=body)

    path = str(tmp_path / "root" / "red")
    loaded = post("load_lora_adapter", lora_name="x", lora_path=path)
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'x' added successfully."
    red = ask(served, "x")
    error_of(post("load_lora_adapter", lora_name="x", lora_path=path), 400)
    error_of(post("load_lora_adapter", lora_name="tiny", lora_path=path), 409)
    blue = str(tmp_path / "root" / "blue")
    assert post("load_lora_adapter", lora_name="x", lora_path=blue, load_inplace=True).status_code == 200
    assert ask(served, "x") != red
    assert post("unload_lora_adapter", lora_name="x", lora_int_id=1).status_code == 200
    assert served.engine.stats()["adapters"] == 0
    error_of(post("unload_lora_adapter", lora_name="x"), 404)


def test_vllms_routes_name_vllms_fields(served: Any, adapter_folders: Folders, tmp_path: Path) -> None:
    good = str(rewritten(adapter_folders["red"], tmp_path / "root" / "good"))
    unfit = str(rewritten(adapter_folders["red"], tmp_path / "root" / "unfit", target_modules=["nothing_here"]))
    for name, path, status, param in (
        ("a b", good, 400, "lora_name"),
        ("..", good, 400, "lora_name"),
        ("tiny", good, 409, "lora_name"),
        ("x", "/etc", 400, "lora_path"),
        ("x", f"{good}/none", 400, "lora_path"),
        ("x", unfit, 400, "lora_path"),
        (5, good, 400, "lora_name"),
        ("x", None, 400, "lora_path"),
    ):
        body = {"lora_name": name, "lora_path": path}
        assert error_of(httpx.post(f"{served.url}/v1/load_lora_adapter", json=body), status)["param"] == param
    absent = httpx.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": "none"})
    assert error_of(absent, 404)["param"] == "lora_name"
    ours = httpx.post(f"{served.url}/v1/adapters", json={"name": "x", "path": "/etc"})
    assert error_of(ours, 400)["param"] == "path"


def test_adapters_and_aliases_are_there_after_a_restart(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    adapter_folders: Folders,
    tmp_path: Path,
    database_url: str,
) -> None:
    settings = {"store": tmp_path / "store", "database": database_url}
    with serve(make_engine(), **settings) as first:
        for name in ("red", "blue"):
            upload(first, "a", adapter_folders[name])
        httpx.post(f"{first.url}/v1/adapters/a/aliases", json={"weights": {"1": 1}})
        texts = [ask(first, model) for model in ("a", "a@2")]
    with serve(make_engine(), **settings) as second:
        tiers = [one["tier"] for one in httpx.get(f"{second.url}/v1/adapters/a").json()["versions"]]
        assert tiers == ["disk", "disk"]
        assert [ask(second, model) for model in ("a", "a@2")] == texts


def test_host_memory_is_bounded_and_what_was_put_away_comes_back(
    make_engine: Callable[..., Any], serve: Callable[..., Any], write_lora: Callable[..., Path], tmp_path: Path
) -> None:
    with serve(make_engine(max_adapters=2), store=tmp_path / "store", host_bytes=1) as served:
        for number in range(4):
            assert upload(served, f"a{number}", write_lora(tmp_path / str(number), number)).status_code == 201
        texts = [ask(served, f"a{number}") for number in range(4)]
        assert served.engine.stats()["adapters"] <= 1
        assert [ask(served, f"a{number}") for number in range(4)] == texts and len(set(texts)) == 4
        cards = httpx.get(f"{served.url}/v1/adapters").json()["data"]
        assert {one["versions"][0]["tier"] for one in cards} == {"disk"}
        served.wait_idle()


def test_a_request_for_a_cold_adapter_is_loaded_once_however_many_ask(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: Folders, tmp_path: Path
) -> None:
    with serve(make_engine(), store=tmp_path / "store") as first:
        upload(first, "a", adapter_folders["red"])
        text = ask(first, "a")
    with serve(make_engine(), store=tmp_path / "store") as second:
        answers: list[str] = []
        threads = [threading.Thread(target=lambda: answers.append(ask(second, "a"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [text] * 6 and second.service.catalog.shelf.num_loads == 1


def test_adapters_of_the_same_weights_have_their_own_templates(
    make_engine: Callable[..., Any], serve: Callable[..., Any], write_lora: Callable[..., Path], tmp_path: Path
) -> None:
    templates = {"twice": "{{ messages[0].content * 2 }}", "once": "{{ messages[0].content }}"}
    engine = make_engine()
    folders = {
        name: write_lora(tmp_path / name, 7, chat_template={"text": text, "sha256": ""})
        for name, text in templates.items()
    }
    for name, folder in folders.items():
        engine.adapters.add(name, folder)
    with serve(engine, store=tmp_path / "store") as server:
        for name, folder in folders.items():
            upload(server, f"sent-{name}", folder)

        def prompt_tokens(model: str) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]

        assert engine.adapters.uid("twice") == engine.adapters.uid("once")
        names = ("twice", "once", "sent-twice", "sent-once")
        assert [prompt_tokens(name) for name in names] == [6, 3, 6, 3]
