"""SQLite's file under a running server: removed or replaced it is noticed, and nothing is made in its place."""

import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit.errors import InputError, RunError
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.records import Limits


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_says_that_its_database_is_gone_and_takes_no_changes(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    adapter_folders: dict[str, Path],
    tmp_path: Path,
    replaced: bool,
) -> None:
    file = tmp_path / "store" / "state.db"
    files = [("files", (path.name, path.read_bytes())) for path in sorted(adapter_folders["red"].iterdir())]
    with serve(make_engine(), store=tmp_path / "store", poll_s=0.02) as server:

        def change() -> list[httpx.Response]:
            return [
                httpx.post(f"{server.url}/v1/adapters", data={"name": "late"}, files=files),
                httpx.delete(f"{server.url}/v1/adapters/red"),
                httpx.post(f"{server.url}/v1/tenants", json={"name": "acme"}),  # the last: it brings a key with it
            ]

        assert httpx.post(f"{server.url}/v1/adapters", data={"name": "red"}, files=files).status_code == 201
        kept = tmp_path / "kept.db"
        file.rename(kept)
        if replaced:
            shutil.copy(kept, file)
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 503 and ready.json()["status"] == "not ready"
        assert "database" in ready.json()["reason"] and str(tmp_path) not in ready.text
        for answer in change():
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "service_unavailable"
            assert "database" in answer.json()["error"]["message"]
        body = {"model": "red", "prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200, "answers need no database"
        assert file.exists() == replaced, "an empty one was made in its place"
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        kept.rename(file)
        deadline = time.monotonic() + 30
        while (ready := httpx.get(f"{server.url}/ready")).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ready.json() == {"status": "ready"}
        assert [answer.status_code for answer in change()] == [201, 200, 201]


def test_a_change_that_was_written_to_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    database = Database(f"sqlite:///{file}")
    with pytest.raises(RunError, match="removed or replaced"), database._changing():
        file.rename(tmp_path / "elsewhere.db")
    with pytest.raises(RunError, match="removed or replaced"):
        database.refresh()
    assert not file.exists()
    database.close()


def test_a_database_that_may_not_be_made_is_not(tmp_path: Path) -> None:
    for name in ("absent.db", "no/such/folder.db"):
        with pytest.raises(InputError, match="no database here") as caught:
            Database(f"sqlite:///{tmp_path / name}", create=False)
        assert caught.value.field == "db" and str(tmp_path / name) in str(caught.value)
    assert not list(tmp_path.iterdir())
    (tmp_path / "other.db").touch()
    with pytest.raises(InputError, match="no tables of peftkit"):
        Database(f"sqlite:///{tmp_path / 'other.db'}", create=False)
    with sqlite3.connect(tmp_path / "other.db") as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [], "tables were put into it"


def test_a_new_database_is_told_from_one_that_was_there(tmp_path: Path) -> None:
    for odd in ("state.db", "a b?c#d%20.db"):
        first = Database(f"sqlite:///{tmp_path / odd}".replace("?", "%3F"))
        first.add_tenant("acme", Limits(), ["*"])
        again = Database(f"sqlite:///{tmp_path / odd}".replace("?", "%3F"), create=False)
        assert first.created and not again.created and "acme" in again.snapshot.tenants
        first.close()
        again.close()
