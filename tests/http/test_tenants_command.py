"""`peftkit tenants` against a server that runs, and refusals in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit.cli.main import run
from peftkit_serve.tenants.database import Database


def said(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """Runs a command that must succeed; its JSON."""
    assert run(["tenants", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_the_command_changes_holds_for_a_running_server(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    tmp_path: Path,
    database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = ["--db", database_url]
    with serve(make_engine(), store=tmp_path / "store", database=database_url, poll_s=0.02) as served:

        def status(key: str) -> int:
            served.database.refresh()
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(f"{served.url}/v1/models", headers=headers).status_code

        first = said(capsys, "add", "acme", "--tokens-per-minute", 1000, "--adapter", "a*", *store)["key"]
        second = said(capsys, "key", "acme", *store)
        assert status(first) == status(second["key"]) == 200 and status("none") == 401
        limits = said(capsys, "set", "acme", "--max-concurrency", 3, *store)["limits"]
        assert (limits["tokens_per_minute"], limits["max_concurrency"]) == (1000, 3)
        assert said(capsys, "set", "acme", "--tokens-per-minute", 0, *store)["limits"]["tokens_per_minute"] is None
        listed = said(capsys, "list", *store)["tenants"]
        assert listed[0]["name"] == "acme" and listed[0]["adapters"] == ["a*"] and len(listed[0]["keys"]) == 2
        assert limits["max_queue"] == 256
        assert said(capsys, "set", "acme", "--max-queue", 7, *store)["limits"] == {
            **limits,
            "max_queue": 7,
            "tokens_per_minute": None,
        }
        assert said(capsys, "set", "acme", "--max-queue", 0, *store)["limits"]["max_queue"] is None
        said(capsys, "revoke", "acme", "--key", second["id"], *store)
        assert status(first) == 200 and status(second["key"]) == 401
        admin = said(capsys, "admin-key", *store)["key"]
        headers = {"authorization": f"Bearer {admin}"}
        served.database.refresh()
        assert httpx.get(f"{served.url}/v1/tenants", headers=headers).json()["data"][0]["name"] == "acme"
        said(capsys, "revoke", "acme", *store)
        assert status(first) == 200, "without tenants inference needs no key"
        assert httpx.get(f"{served.url}/v1/tenants").status_code == 401


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["add", ".."], "can't be a name"),
        (["set", "nobody"], "no tenant 'nobody'"),
        (["revoke", "nobody"], "no tenant 'nobody'"),
        (["revoke", "nobody", "--key", "x"], "no key 'x'"),
        (["key", "nobody"], "no tenant 'nobody'"),
        (["list", "--db", "nonsense"], "--db"),
    ],
)
def test_bad_input_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], wanted: str) -> None:
    Database(f"sqlite:///{tmp_path / 'state.db'}").close()
    assert run(["tenants", *words, *(() if "--db" in words else ("--store", str(tmp_path)))]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and wanted in captured.err


@pytest.mark.parametrize(
    "words", [["list"], ["set", "a"], ["revoke", "a"], ["revoke", "a", "--key", "x"], ["key", "a"], ["admin-key"]]
)
def test_a_mistyped_place_is_refused_and_nothing_is_made_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    for where in (["--store", tmp_path / "typo"], ["--db", f"sqlite:///{tmp_path / 'typo.db'}"]):
        assert run(["tenants", *words, *map(str, where)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") <= 2
        assert "no database" in captured.err and str(tmp_path / "typo") in captured.err and "--store" in captured.err
    assert not list(tmp_path.iterdir())


def test_the_first_tenant_makes_the_database_and_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = ["--store", str(tmp_path / "store")]
    assert run(["tenants", "add", "first", *place]) == 0
    assert f"{tmp_path / 'store' / 'state.db'}: made a new one" in capsys.readouterr().err
    assert run(["tenants", "add", "second", *place]) == 0
    assert capsys.readouterr().err == ""
    assert [one["name"] for one in said(capsys, "list", *place)["tenants"]] == ["first", "second"]
