"""Where the state lies unless it is said otherwise: in peftkit's own folder."""

from pathlib import Path

from peftkit.base import cache_dir
from peftkit_serve.tenants.database import Database


def store_of(given: Path | None) -> Path:
    """The folder of a server's adapters and database."""
    return cache_dir() / "serve" if given is None else given.expanduser()


def database_of(url: str | None, store: Path | None = None) -> str:
    """The database's address; without one, a file in the store."""
    return url or f"sqlite:///{store_of(store) / 'state.db'}"


def has_tenants(url: str) -> bool:
    """Whether a database has a tenant, so that a server of it asks for keys. Raises InputError (field "db")."""
    database = Database(url)
    try:
        return bool(database.snapshot.tenants)
    finally:
        database.close()
