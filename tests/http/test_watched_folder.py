"""The watched folder: what lies in it is served, as it comes, changes and goes, and nothing else is touched by it."""

import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.records import Limits

FILES = ("adapter_config.json", "adapter_model.safetensors", "peftkit.json")
Folders = dict[str, Path]
Watching = Callable[[Path | None], Any]


@pytest.fixture
def watching(make_engine: Callable[..., Any], serve: Callable[..., Any], tmp_path: Path, database_url: str) -> Watching:
    """Serves one store and database with the folder that is given."""

    @contextmanager
    def start(folder: Path | None) -> Iterator[Any]:
        settings = {"store": tmp_path / "store", "database": database_url, "poll_s": 0.05}
        with serve(make_engine(), watched=folder, **settings) as server:
            yield server
            server.wait_idle()

    return start


def put(source: Path, target: Path) -> None:
    """Writes beside it, and puts a link in the place of what is there: at no moment is there none."""
    files = target.parent / f".{uuid.uuid4().hex}"
    files.mkdir(parents=True)
    for name in FILES:
        (files / name).write_bytes((source / name).read_bytes())
    link = target.with_name(".link")
    link.symlink_to(files.name)
    link.replace(target)


def take_away(link: Path) -> None:
    link.unlink()


def upload(server: Any, name: str, folder: Path) -> httpx.Response:
    files = [("files", (file, (folder / file).read_bytes())) for file in FILES]
    return httpx.post(f"{server.url}/v1/adapters", data={"name": name}, files=files, timeout=30)


def names(server: Any) -> list[str]:
    return [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]


def versions(server: Any, name: str) -> list[int]:
    return [one["version"] for one in httpx.get(f"{server.url}/v1/adapters/{name}").json()["versions"]]


def ask(server: Any, model: str) -> str:
    body = {"model": model, "prompt": "abcdef", "max_tokens": 16, "seed": 1, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_adapters_are_served_as_they_come_and_change(
    watching: Watching, adapter_folders: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / "watched"
    put(adapter_folders["red"], folder / "a")
    with watching(folder) as served:
        assert names(served) == ["tiny", "a"]
        first = ask(served, "a")
        (folder / "bad").mkdir()
        (folder / "bad" / "adapter_config.json").write_text("{")
        (folder / "bad" / "dangling").symlink_to(tmp_path / "nowhere")
        put(adapter_folders["blue"], folder / "b")
        wait_for(lambda: "b" in names(served))
        put(adapter_folders["blue"], folder / "a")
        wait_for(lambda: len(versions(served, "a")) == 2)
        assert ask(served, "a") == ask(served, "b") != first and ask(served, "a@1") == first
        assert names(served) == ["tiny", "a", "b"]
        assert httpx.post(f"{served.url}/v1/adapters/a/rollback").status_code == 200 and ask(served, "a") == first
    with watching(folder) as again:
        assert versions(again, "a") == [1, 2], "the same content is no new version"
        assert ask(again, "a") == first


def test_uploads_outlive_a_watched_folder_that_is_given_moved_and_left_out(
    watching: Watching, adapter_folders: Folders, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "watched", tmp_path / "moved"
    shutil.copytree(adapter_folders["red"], folder / "mine")
    with watching(None) as served:
        assert upload(served, "sent", adapter_folders["blue"]).status_code == 201
        sent = ask(served, "sent")
    with watching(folder) as served:
        assert names(served) == ["tiny", "mine", "sent"]
        assert upload(served, "late", adapter_folders["soft"]).status_code == 201
        mine, late = ask(served, "mine"), ask(served, "late")
    with watching(None) as served:
        assert names(served) == ["tiny", "late", "sent"]
        assert [ask(served, name) for name in ("late", "sent")] == [late, sent]
    folder.rename(moved)
    with watching(moved) as served:
        assert names(served) == ["tiny", "late", "mine", "sent"]
        assert [ask(served, name) for name in ("late", "mine", "sent")] == [late, mine, sent]


def test_a_folder_that_is_gone_takes_its_own_adapter_along(
    watching: Watching, adapter_folders: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / "watched"
    for name in ("a", "b"):
        put(adapter_folders["red"], folder / name)
    shutil.copytree(adapter_folders["red"], folder / "c")
    with watching(folder) as served:
        upload(served, "sent", adapter_folders["blue"])
        take_away(folder / "a")
        wait_for(lambda: names(served) == ["tiny", "b", "c", "sent"])
        put(adapter_folders["blue"], folder / "a")
        wait_for(lambda: "a" in names(served))
        assert versions(served, "a") == [2], "a number is never used again"
    take_away(folder / "b")
    with watching(folder) as served:
        assert names(served) == ["tiny", "a", "c", "sent"]
        folder.rename(tmp_path / "elsewhere")  # as when its disk is gone: what is in it isn't known
        time.sleep(0.3)
        assert names(served) == ["tiny", "a", "c", "sent"]
        folder.mkdir()
        wait_for(lambda: names(served) == ["tiny", "sent"])
        wait_for(lambda: len(list(tmp_path.glob("store/adapters/*/content/*"))) == 1)


def test_a_name_of_the_watched_folder_is_its_own(watching: Watching, adapter_folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    with watching(folder) as served:
        upload(served, "a", adapter_folders["blue"])
        sent = ask(served, "a")
        put(adapter_folders["red"], folder / "a")
        wait_for(lambda: httpx.get(f"{served.url}/v1/adapters/a").json()["watched"])
        assert ask(served, "a") != sent
        (card,) = httpx.get(f"{served.url}/v1/adapters").json()["data"]
        assert (card["name"], card["tenant"], card["watched"], card["fixed"]) == ("a", None, True, False)
        for answer in (upload(served, "a", adapter_folders["soft"]), httpx.delete(f"{served.url}/v1/adapters/a")):
            assert answer.status_code == 409 and "watched folder" in answer.json()["error"]["message"]
        take_away(folder / "a")
        wait_for(lambda: not httpx.get(f"{served.url}/v1/adapters/a").json()["watched"])
        assert ask(served, "a") == sent, "what was sent is back"
        assert httpx.delete(f"{served.url}/v1/adapters/a").status_code == 200


def test_a_disk_that_fails_at_one_adapter_stops_neither_others_nor_changes_of_keys(
    watching: Watching, adapter_folders: Folders, tmp_path: Path, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    with watching(folder) as served:
        (incoming,) = tmp_path.glob("store/adapters/*/incoming")
        incoming.rmdir()
        put(adapter_folders["red"], folder / "a")
        wait_for(lambda: any("'a' is refused" in record.message for record in caplog.records))
        incoming.mkdir()
        put(adapter_folders["blue"], folder / "b")
        wait_for(lambda: names(served) == ["tiny", "b"])
        other = Database(database_url)
        other.add_tenant("acme", Limits(), ["*"])
        other.close()
        wait_for(lambda: httpx.get(f"{served.url}/v1/models").status_code == 401)
