"""`peftkit tenants`: who may use a server, with which keys and limits, straight in the server's database."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peftkit.cli import output

if TYPE_CHECKING:
    from peftkit_serve.tenants.database import Database
    from peftkit_serve.tenants.keys import NewKey
    from peftkit_serve.tenants.records import Limits

app = typer.Typer(help="Tenants of a server: add, list, set, revoke, key, admin-key. A running server sees it at once.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.")]
Db = Annotated[str | None, typer.Option("--db", metavar="URL", help="The server's database, as `peftkit serve --db`.")]
Store = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="The server's store, as `peftkit serve`.")]
Adapters = Annotated[
    list[str] | None, typer.Option("--adapter", metavar="PATTERN", help="A shared adapter that it may name; repeat.")
]
Rpm = Annotated[int | None, typer.Option("--requests-per-minute", min=0, help="0 is without limit.")]
Tpm = Annotated[int | None, typer.Option("--tokens-per-minute", min=0, help="Prompt and answer; 0 is without limit.")]
Concurrency = Annotated[int | None, typer.Option("--max-concurrency", min=0, help="Answers at a time; 0: no limit.")]
MaxQueue = Annotated[
    int | None,
    typer.Option(
        "--max-queue", min=0, help="Of these, those that wait for their first token, at first 256; 0: no limit."
    ),
]
MaxAdapters = Annotated[int | None, typer.Option("--max-adapters", min=0, help="Adapters of its own; 0: no limit.")]
MaxBytes = Annotated[int | None, typer.Option("--max-adapter-bytes", min=0, help="Bytes of them; 0: no limit.")]
Weight = Annotated[float | None, typer.Option("--weight", min=0.001, max=1000, help="Share of a busy engine.")]


@app.command()
def add(
    name: Name,
    adapter: Adapters = None,
    requests_per_minute: Rpm = None,
    tokens_per_minute: Tpm = None,
    max_concurrency: Concurrency = None,
    max_queue: MaxQueue = None,
    max_adapters: MaxAdapters = None,
    max_adapter_bytes: MaxBytes = None,
    weight: Weight = None,
    db: Db = None,
    store: Store = None,
) -> None:
    """Add a tenant and show its key, this once. Makes the database where there is none yet."""
    from peftkit_serve.tenants.names import check_name
    from peftkit_serve.tenants.records import Limits

    check_name(name)
    given = _given(
        weight,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_adapters=max_adapters,
        max_adapter_bytes=max_adapter_bytes,
    )
    with _opened(db, store, create=True) as database:
        if database.created:
            output.note(f"there was no database at {database.shown_url}: made a new one")
        _show_key(name, database.add_tenant(name, replace(Limits(), **given), adapter or ["*"]))


@app.command("list")
def list_tenants(db: Db = None, store: Store = None) -> None:
    """List tenants with their limits and the ids of their keys."""
    with _opened(db, store) as database:
        snapshot = database.snapshot
        rows: list[dict[str, Any]] = [
            {
                "name": tenant.name,
                "adapters": list(tenant.adapters),
                "limits": tenant.limits.plain(),
                "keys": [key.id for key in snapshot.keys.values() if key.tenant == tenant.name],
            }
            for tenant in snapshot.tenants.values()
        ]
    cells = [[row["name"], ", ".join(row["adapters"]), _worded(row["limits"]), ", ".join(row["keys"])] for row in rows]
    output.emit({"tenants": rows}, lambda: output.table(["name", "shared adapters", "limits", "keys"], cells))


@app.command("set")
def set_tenant(
    name: Name,
    adapter: Adapters = None,
    requests_per_minute: Rpm = None,
    tokens_per_minute: Tpm = None,
    max_concurrency: Concurrency = None,
    max_queue: MaxQueue = None,
    max_adapters: MaxAdapters = None,
    max_adapter_bytes: MaxBytes = None,
    weight: Weight = None,
    db: Db = None,
    store: Store = None,
) -> None:
    """Change a tenant's limits or shared adapters; what is left out stays."""
    given = _given(
        weight,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrency=max_concurrency,
        max_queue=max_queue,
        max_adapters=max_adapters,
        max_adapter_bytes=max_adapter_bytes,
    )
    with _opened(db, store) as database:
        tenant = database.snapshot.tenants.get(name)
        limits: Limits | None = None if tenant is None else replace(tenant.limits, **given)
        database.set_tenant(name, limits, adapter)
        limits = database.snapshot.tenants[name].limits
    output.emit({"name": name, "limits": limits.plain()}, f"{name}: {_worded(limits.plain())}")


@app.command()
def revoke(
    name: Name,
    key: Annotated[str | None, typer.Option(metavar="ID", help="Only this key; the tenant stays.")] = None,
    db: Db = None,
    store: Store = None,
) -> None:
    """Remove a tenant with its keys and adapters, or one of its keys."""
    with _opened(db, store) as database:
        if key is None:
            database.remove_tenant(name)
        else:
            database.remove_key(name, key)
    output.emit({"name": name, "key": key}, f"{name} is removed" if key is None else f"key {key} of {name} is revoked")


@app.command("key")
def add_key(name: Name, db: Db = None, store: Store = None) -> None:
    """Make one more key for a tenant and show it, this once."""
    with _opened(db, store) as database:
        _show_key(name, database.add_key(name))


@app.command("admin-key")
def admin_key(db: Db = None, store: Store = None) -> None:
    """Make a key for the administrator's routes and show it, this once."""
    with _opened(db, store) as database:
        _show_key(None, database.add_key(None))


@contextmanager
def _opened(db: str | None, store: Path | None, *, create: bool = False) -> "Iterator[Database]":
    """The server's database; one that isn't there is likelier a mistyped place than one that is wanted."""
    from peftkit_serve.tenants.database import Database
    from peftkit_serve.tenants.places import database_of

    database = Database(database_of(db, store), create=create)
    try:
        yield database
    finally:
        database.close()


def _given(weight: float | None, **counts: int | None) -> dict[str, Any]:
    """The limits that were typed; 0 is without limit."""
    limits: dict[str, Any] = {name: count or None for name, count in counts.items() if count is not None}
    return limits | ({} if weight is None else {"weight": weight})


def _show_key(tenant: str | None, key: "NewKey") -> None:
    whose = "the administrator" if tenant is None else tenant
    said = f"{key.text}\n(the key of {whose}: it is not shown again)"
    output.emit({"name": tenant, "id": key.id, "key": key.text}, said)


def _worded(limits: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in limits.items() if value is not None)
