"""The lasting state: tenants, keys, adapters and versions, in SQLite or PostgreSQL.

Every change is one transaction that also raises the revision, so whatever kills the process, a change is there whole
or not at all; and every server of one database sees it, because it compares revisions. Readers use the last
`Snapshot`, in memory. All methods block: call them on a thread that may.
"""

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from peftkit.errors import InputError, RunError, did_you_mean
from peftkit_serve.tenants import tables
from peftkit_serve.tenants.keys import NewKey, new_key
from peftkit_serve.tenants.records import Adapter, Key, Limits, Snapshot, Tenant, Version, tenant_of

_MAX_HISTORY = 16

Weights = Mapping[int, float]
Mark = tuple[int, int]

LOST = (
    "the database's file was removed or replaced meanwhile: nothing can be changed until it is put back, or the server "
    "is started anew"
)


class NameInUse(InputError):
    """A tenant of this name exists already."""


class QuotaExceeded(InputError):
    """A tenant has as many adapters, or bytes of them, as it may have."""


class Database:
    """The state of all tenants, and the adapters of one base."""

    def __init__(self, url: str, base: str = "", *, create: bool = True) -> None:
        """
        url: SQLAlchemy's: "sqlite:///path" or "postgresql+psycopg://…"; the schema is brought up to date.
        base: what tells this base's adapters from those of others in the same database.
        create: whether a database that isn't there is made.

        Raises InputError (field "db") for an address that can't be used, or where nothing is that may not be made.
        """
        self._base = base
        self._lock = threading.Lock()
        self._mark: Mark | None = None
        self.created = False
        """Whether it was not there before."""
        self.snapshot = Snapshot()
        """The last state that was read; never changes in place."""
        try:
            address = sa.make_url(url)
            self.shown_url = address.render_as_string()
            """Its address without a password."""
            if address.get_backend_name() == "postgresql" and address.get_driver_name() != "psycopg":
                address = address.set(drivername="postgresql+psycopg")
            self._file = _file_of(address)
            if self._file is not None:
                _provide(self._file, create)
                # from here on a file that isn't there is an error, which SQLite would mend by an empty one
                query = {**address.query, "mode": "rw", "uri": "true"}
                address = address.set(database=f"file:{quote(str(self._file))}", query=query)
            self._engine = _connectable(address)
            self._migrate(create)
            self._mark = _mark_of(self._file)
            self.refresh()
        except ModuleNotFoundError as error:
            raise InputError(
                f"--db needs the package {error.name}: pip install 'peftkit[postgres]'", field="db"
            ) from None
        except (SQLAlchemyError, OSError) as error:
            reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise InputError(f"--db: this database can't be used: {reason}", field="db") from None

    @property
    def is_there(self) -> bool:
        """Whether SQLite's file is still the one that was opened: one that was removed or replaced would go on taking
        changes, which would be gone with the process."""
        return self._mark == _mark_of(self._file)

    def close(self) -> None:
        """Gives the connections back."""
        self._engine.dispose()

    def refresh(self) -> bool:
        """Reads the state again if it has changed; whether it had."""
        self._require_file()
        with self._lock, self._reading() as connection:
            revision = int(connection.execute(sa.select(tables.state.c.revision)).scalar_one())
            if revision == self.snapshot.revision:
                return False
            self.snapshot = self._read(connection, revision)
            return True

    def add_tenant(self, name: str, limits: Limits, adapters: Sequence[str]) -> NewKey:
        """A new tenant, and its first key. Raises NameInUse (field "name")."""
        row = {"name": name, "limits": limits.plain(), "adapters": list(adapters), "created": time.time()}
        with self._changing() as connection:
            try:
                connection.execute(sa.insert(tables.tenants).values(**row))
            except IntegrityError:
                raise NameInUse(f"there is a tenant '{name}' already", field="name") from None
            return self._insert_key(connection, name)

    def set_tenant(self, name: str, limits: Limits | None = None, adapters: Sequence[str] | None = None) -> None:
        """Changes a tenant's limits or its shared adapters."""
        given: dict[str, Any] = {} if limits is None else {"limits": limits.plain()}
        given |= {} if adapters is None else {"adapters": list(adapters)}
        with self._changing() as connection:
            self._require_tenant(connection, name)
            if given:
                connection.execute(sa.update(tables.tenants).where(tables.tenants.c.name == name).values(**given))

    def remove_tenant(self, name: str) -> None:
        """Removes a tenant with its keys and all names of its adapters, of every base."""
        with self._changing() as connection:
            self._require_tenant(connection, name)
            connection.execute(sa.delete(tables.versions).where(tables.versions.c.owner == name))
            connection.execute(sa.delete(tables.adapters).where(tables.adapters.c.owner == name))
            connection.execute(sa.delete(tables.keys).where(tables.keys.c.tenant == name))
            connection.execute(sa.delete(tables.tenants).where(tables.tenants.c.name == name))

    def add_key(self, tenant: str | None) -> NewKey:
        """A new key of a tenant, or of the administrator; the only moment when it is known."""
        with self._changing() as connection:
            if tenant is not None:
                self._require_tenant(connection, tenant)
            return self._insert_key(connection, tenant)

    def remove_key(self, tenant: str | None, key_id: str) -> None:
        """Revokes a key. Raises InputError (field "key") where there is none."""
        with self._changing() as connection:
            found = sa.and_(tables.keys.c.id == key_id, tables.keys.c.tenant.is_not_distinct_from(tenant))
            if not connection.execute(sa.delete(tables.keys).where(found)).rowcount:
                raise InputError(f"there is no key '{key_id[:64]}'", field="key")

    def add_version(self, owner: str, name: str, content: Mapping[str, Any]) -> Version:
        """A new version of a name, which takes all of its requests from now on.

        content: the fields of `Version` but number and created. Raises InputError where the owner's limits are passed.
        """
        with self._changing() as connection:
            self._check_room(connection, owner, name, int(content["nbytes"]))
            row = self._adapter_row(connection, owner, name)
            number = 1 if row is None else int(row["last_version"]) + 1
            weights = {str(number): 1.0}
            if row is None:
                values = {"last_version": number, "weights": weights, "history": [], **self._named(owner, name)}
                connection.execute(sa.insert(tables.adapters).values(**values))
            else:
                self._route(connection, row, weights, last_version=number)
            version = Version(**content, number=number, created=time.time())
            connection.execute(sa.insert(tables.versions).values(**asdict(version), **self._named(owner, name)))
        return version

    def set_weights(self, owner: str, name: str, weights: Weights) -> None:
        """Sends shares of a name's requests to versions, all of which must be there."""
        with self._changing() as connection:
            row = self._require_adapter(connection, owner, name)
            self._route(connection, row, {str(number): share for number, share in weights.items()})

    def roll_back(self, owner: str, name: str) -> None:
        """Back to the weights before. Raises InputError (field "name") where there were none."""
        with self._changing() as connection:
            row = self._require_adapter(connection, owner, name)
            if not row["history"]:
                raise InputError(f"adapter '{name}' has nothing to roll back to", field="name")
            *earlier, last = row["history"]
            self._update(connection, row, weights=last, history=earlier)

    def remove_version(self, owner: str, name: str, number: int) -> None:
        """Removes a version that no request is sent to. Raises InputError (field "name") for one that is."""
        with self._changing() as connection:
            row = self._require_adapter(connection, owner, name)
            if str(number) in row["weights"]:
                raise InputError(
                    f"'{name}@{number}' gets requests: send them to another version first, or remove the whole name",
                    field="name",
                )
            connection.execute(sa.delete(tables.versions).where(self._is_version(owner, name, number)))
            history = [weights for weights in row["history"] if str(number) not in weights]
            self._update(connection, row, history=history)

    def remove_adapter(self, owner: str, name: str) -> None:
        """Removes a name with all its versions; their numbers are not used again."""
        with self._changing() as connection:
            row = self._require_adapter(connection, owner, name)
            connection.execute(sa.delete(tables.versions).where(self._is_version(owner, name)))
            self._update(connection, row, weights={}, history=[])

    # From here on: within a transaction.

    @contextmanager
    def _reading(self) -> Generator[sa.Connection, None, None]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except OperationalError as error:
            raise RunError(f"the database doesn't answer: {type(error.orig).__name__}") from None

    @contextmanager
    def _changing(self) -> Generator[sa.Connection, None, None]:
        """A transaction, one at a time in all processes; the snapshot is new when it has ended."""
        self._require_file()
        try:
            with self._engine.begin() as connection:
                # the first statement writes: it is the lock that all changes queue at
                connection.execute(sa.update(tables.state).values(revision=tables.state.c.revision + 1))
                yield connection
        except OperationalError as error:
            raise RunError(f"the database doesn't answer: {type(error.orig).__name__}") from None
        self.refresh()  # which also sees whether the file went meanwhile

    def _require_file(self) -> None:
        if not self.is_there:
            raise RunError(LOST)

    def _migrate(self, create: bool) -> None:
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        # servers that start together migrate in turn
        with self._engine.execution_options(sqlite_begin="BEGIN IMMEDIATE").begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(7323510938)"))
            self.created = not sa.inspect(connection).has_table(tables.state.name)
            if self.created and not create:
                raise _absent("it has no tables of peftkit's")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def _read(self, connection: sa.Connection, revision: int) -> Snapshot:
        tenants = {
            row.name: Tenant(row.name, Limits.read(row.limits), tuple(row.adapters), row.created)
            for row in connection.execute(sa.select(tables.tenants).order_by(tables.tenants.c.name))
        }
        keys = {
            row.id: Key(row.id, row.tenant, bytes(row.salt), bytes(row.digest), row.created)
            for row in connection.execute(sa.select(tables.keys).order_by(tables.keys.c.created))
        }
        own = tables.versions.c.base == self._base
        found: dict[tuple[str, str], dict[int, Version]] = {}
        for row in connection.execute(sa.select(tables.versions).where(own).order_by(tables.versions.c.number)):
            fields = {name: getattr(row, name) for name in Version.__dataclass_fields__}
            found.setdefault((row.owner, row.name), {})[row.number] = Version(**fields)
        adapters = {
            (row.owner, row.name): Adapter(
                row.owner,
                row.name,
                found[row.owner, row.name],
                _numbered(row.weights),
                tuple(map(_numbered, row.history)),
            )
            for row in connection.execute(sa.select(tables.adapters).where(tables.adapters.c.base == self._base))
            if (row.owner, row.name) in found
        }
        return Snapshot(revision, tenants, keys, adapters)

    def _insert_key(self, connection: sa.Connection, tenant: str | None) -> NewKey:
        key = new_key()
        row = {"id": key.id, "tenant": tenant, "salt": key.salt, "digest": key.digest, "created": time.time()}
        connection.execute(sa.insert(tables.keys).values(**row))
        return key

    def _require_tenant(self, connection: sa.Connection, name: str) -> Limits:
        row = connection.execute(sa.select(tables.tenants).where(tables.tenants.c.name == name)).one_or_none()
        if row is None:
            hint = did_you_mean(name[:128], self.snapshot.tenants)
            raise InputError(f"there is no tenant '{name[:128]}'{hint}", field="tenant")
        return Limits.read(row.limits)

    def _check_room(self, connection: sa.Connection, owner: str, name: str, nbytes: int) -> None:
        if tenant_of(owner) is None:
            return
        limits = self._require_tenant(connection, owner)
        mine = tables.versions.c.owner == owner
        names = set(connection.execute(sa.select(tables.versions.c.name).where(mine).distinct()).scalars())
        if limits.max_adapters is not None and len(names | {name}) > limits.max_adapters:
            raise QuotaExceeded(f"tenant '{owner}' may have {limits.max_adapters} adapters: remove one", field="tenant")
        used = int(connection.execute(sa.select(sa.func.sum(tables.versions.c.nbytes)).where(mine)).scalar() or 0)
        if limits.max_adapter_bytes is not None and used + nbytes > limits.max_adapter_bytes:
            raise QuotaExceeded(
                f"tenant '{owner}' may have {limits.max_adapter_bytes} bytes of adapters and has {used}, "
                f"this one has {nbytes}: remove a version",
                field="tenant",
            )

    def _require_adapter(self, connection: sa.Connection, owner: str, name: str) -> Mapping[str, Any]:
        row = self._adapter_row(connection, owner, name)
        if row is None or not row["weights"]:
            raise InputError(f"there is no adapter '{name[:128]}'", field="name")
        return row

    def _adapter_row(self, connection: sa.Connection, owner: str, name: str) -> Mapping[str, Any] | None:
        row = (
            connection.execute(sa.select(tables.adapters).where(self._is_adapter(owner, name))).mappings().one_or_none()
        )
        return cast(Mapping[str, Any] | None, row)

    def _route(
        self, connection: sa.Connection, row: Mapping[str, Any], weights: Mapping[str, float], **more: Any
    ) -> None:
        """New weights; the old ones are where rollback goes."""
        history = [*row["history"], *([row["weights"]] if row["weights"] else [])][-_MAX_HISTORY:]
        self._update(connection, row, weights=dict(weights), history=history, **more)

    def _update(self, connection: sa.Connection, row: Mapping[str, Any], **values: Any) -> None:
        where = self._is_adapter(row["owner"], row["name"])
        connection.execute(sa.update(tables.adapters).where(where).values(**values))

    def _named(self, owner: str, name: str) -> dict[str, str]:
        return {"base": self._base, "owner": owner, "name": name}

    def _is_adapter(self, owner: str, name: str) -> sa.ColumnElement[bool]:
        table = tables.adapters.c
        return sa.and_(table.base == self._base, table.owner == owner, table.name == name)

    def _is_version(self, owner: str, name: str, number: int | None = None) -> sa.ColumnElement[bool]:
        table = tables.versions.c
        one = sa.true() if number is None else table.number == number
        return sa.and_(table.base == self._base, table.owner == owner, table.name == name, one)


def _file_of(address: sa.URL) -> Path | None:
    """SQLite's file; None for a server, for memory, and for an address in SQLite's own form."""
    named = address.get_backend_name() == "sqlite" and address.database not in (None, "", ":memory:")
    return Path(str(address.database)).absolute() if named and "uri" not in address.query else None


def _provide(file: Path, create: bool) -> None:
    if create:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    elif not file.exists():
        raise _absent(f"there is no file {file}")


def _absent(reason: str) -> InputError:
    return InputError(
        f"there is no database here, {reason}: name the server's by --db or --store; `peftkit serve` and "
        "`peftkit tenants add` make a new one",
        field="db",
    )


def _mark_of(file: Path | None) -> Mark | None:
    """What tells a file from another one that comes to have its name."""
    try:
        found = None if file is None else file.stat()
    except FileNotFoundError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def _connectable(address: sa.URL) -> sa.Engine:
    if address.get_backend_name() != "sqlite":
        return sa.create_engine(address, pool_pre_ping=True)
    engine = sa.create_engine(address, connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # sqlite3's own idea of transactions ends them too early
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))

    return engine


def _numbered(weights: Mapping[str, float]) -> dict[int, float]:
    return {int(number): float(share) for number, share in weights.items()}
