"""Adapters on their way in and out: none waits for another, and what is freed is told."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit_serve import AsyncEngine
from peftkit_serve.http import create_app
from peftkit_serve.http.settings import Settings
from peftkit_serve.tenants.content import Arrival
from peftkit_serve.tenants.database import QuotaExceeded
from peftkit_serve.tenants.records import SHARED, Limits

Folders = dict[str, Path]


def upload(server: Any, name: str, folder: Path) -> httpx.Response:
    files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    return httpx.post(f"{server.url}/v1/adapters", data={"name": name}, files=files, timeout=30)


def held(folder: Path) -> tuple[Callable[[Arrival], None], threading.Event, threading.Event]:
    """An upload of a folder, that it has begun, and what it then waits for."""
    begun, go_on = threading.Event(), threading.Event()

    def arrive(arrival: Arrival) -> None:
        begun.set()
        assert go_on.wait(60)
        arrival.copy(folder)

    return arrive, begun, go_on


async def test_an_upload_waits_for_none_that_is_still_unpacked(
    make_engine: Callable[..., Any], adapter_folders: Folders, tmp_path: Path
) -> None:
    app = create_app(AsyncEngine(make_engine()), served_name="tiny", settings=Settings(store=tmp_path))
    catalog = app.state.service.catalog
    slowly, begun, go_on = held(adapter_folders["red"])

    async with app.router.lifespan_context(app):
        try:
            slow = asyncio.create_task(catalog.publish(SHARED, "slow", slowly))
            assert await asyncio.to_thread(begun.wait, 60)
            for name in ("blue", "soft", "red"):
                source = adapter_folders[name]
                await asyncio.wait_for(catalog.publish(SHARED, name, lambda to, of=source: to.copy(of)), 60)
            await asyncio.wait_for(catalog.remove(SHARED, "red"), 60)
            assert not slow.done()
        finally:
            go_on.set()
        assert (await slow).number == 1
        assert [adapter.name for adapter in catalog.list_owned(SHARED)] == ["blue", "slow", "soft"]
        async with catalog.shelf.hold((await slow).digest) as entry:
            assert entry.rank == 4, "the files that it shares with one that is removed are there"


async def test_who_gives_up_while_it_is_unpacked_leaves_nothing_half_done(
    make_engine: Callable[..., Any], adapter_folders: Folders, tmp_path: Path
) -> None:
    app = create_app(AsyncEngine(make_engine()), served_name="tiny", settings=Settings(store=tmp_path))
    catalog = app.state.service.catalog
    slowly, begun, go_on = held(adapter_folders["red"])

    async with app.router.lifespan_context(app):
        slow = asyncio.create_task(catalog.publish(SHARED, "slow", slowly))
        assert await asyncio.to_thread(begun.wait, 60)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        go_on.set()
        async with asyncio.timeout(60):
            while list(tmp_path.glob("adapters/*/unsettled/*")) or not catalog.list_owned(SHARED):
                await asyncio.sleep(0.01)
        await asyncio.wait_for(catalog.remove(SHARED, "slow"), 60)
        assert not list(tmp_path.glob("adapters/*/*/*"))


async def test_the_same_content_sent_often_at_once_is_kept_or_gone_as_the_last_one_says(
    make_engine: Callable[..., Any], adapter_folders: Folders, tmp_path: Path
) -> None:
    app = create_app(AsyncEngine(make_engine()), served_name="tiny", settings=Settings(store=tmp_path))
    catalog = app.state.service.catalog

    def good(arrival: Arrival) -> None:
        arrival.copy(adapter_folders["red"])

    app.state.database.add_tenant("full", Limits(max_adapters=0), [])
    owners = [SHARED, SHARED, "full"] * 3

    async with app.router.lifespan_context(app):
        for _ in range(3):
            made = await asyncio.gather(
                *(catalog.publish(owner, f"a{number}", good) for number, owner in enumerate(owners)),
                return_exceptions=True,
            )
            assert [isinstance(one, QuotaExceeded) for one in made] == [owner == "full" for owner in owners]
            digest = next(iter(catalog.list_owned(SHARED)[0].versions.values())).digest
            names = [adapter.name for adapter in catalog.list_owned(SHARED)]
            assert len(names) == 6
            *others, last = names
            await asyncio.gather(*(catalog.remove(SHARED, name) for name in others))
            assert catalog.shelf.folder(digest).is_dir()
            # one comes while the last goes: it must find its files, whoever is first
            _, late = await asyncio.gather(catalog.remove(SHARED, last), catalog.publish(SHARED, "late", good))
            assert sorted(path.name for path in catalog.shelf.folder(late.digest).iterdir())
            await catalog.remove(SHARED, "late")
            assert not list(tmp_path.glob("adapters/*/*/*"))


def test_what_others_still_use_is_not_counted_as_freed(
    make_engine: Callable[..., Any], serve: Callable[..., Any], write_lora: Callable[..., Path], tmp_path: Path
) -> None:
    same = {name: write_lora(tmp_path / name, 7, note=name) for name in ("first", "second", "fixed")}
    engine = make_engine()
    with serve(engine, store=tmp_path / "store") as server:
        sizes = {}
        for name in ("first", "second"):
            assert upload(server, name, same[name]).status_code == 201
        upload(server, "again", same["first"])
        for name in ("first", "again", "second"):
            sizes[name] = httpx.delete(f"{server.url}/v1/adapters/{name}").json()["freed_bytes"]
        assert sizes["first"] == sizes["again"] == 0, "the same weights are still there"
        assert sizes["second"] > 1000
        server.wait_idle()
    engine = make_engine()
    engine.adapters.add("fixed", same["fixed"])
    with serve(engine, store=tmp_path / "other") as server:
        upload(server, "first", same["first"])
        assert httpx.delete(f"{server.url}/v1/adapters/first").json()["freed_bytes"] == 0
        server.wait_idle()


def test_an_upload_is_answered_as_it_came_whoever_removes_it_at_once(
    make_engine: Callable[..., Any],
    serve: Callable[..., Any],
    adapter_folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve(make_engine(), store=tmp_path / "store") as server:
        database = server.database
        add_version = database.add_version

        def added_and_removed(owner: str, name: str, content: dict[str, Any]) -> Any:
            added = add_version(owner, name, content)
            database.remove_adapter(owner, name)  # as another server of the same database can
            return added

        monkeypatch.setattr(database, "add_version", added_and_removed)
        answer = upload(server, "a", adapter_folders["red"])
        assert answer.status_code == 201, answer.text
        assert (answer.json()["name"], answer.json()["version"], answer.json()["weight"]) == ("a", 1, 1.0)
        assert httpx.get(f"{server.url}/v1/adapters/a").status_code == 404
        server.wait_idle()
