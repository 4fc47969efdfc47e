"""The lasting state, on SQLite and, where PEFTKIT_TEST_DATABASE names one, on PostgreSQL."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from peftkit.errors import InputError
from peftkit_serve.tenants import tables
from peftkit_serve.tenants.database import Database, NameInUse, QuotaExceeded
from peftkit_serve.tenants.keys import matches, new_key, parse
from peftkit_serve.tenants.records import SHARED, Limits

MakeDatabase = Callable[..., Database]


@pytest.fixture
def make_database(database_url: str) -> Iterator[MakeDatabase]:
    """Opens the same database as often as it is called."""
    opened: list[Database] = []

    def make(base: str = "base") -> Database:
        opened.append(Database(database_url, base))
        return opened[-1]

    yield make
    for database in opened:
        database.close()


def content(digest: str = "d" * 64, nbytes: int = 100, **fields: Any) -> dict[str, Any]:
    made = {"uid": "u" * 64, "kind": "lora", "rank": 8, "num_virtual": 0, "template": None}
    return {"digest": digest, "nbytes": nbytes, **made, **fields}


def test_the_migrations_make_the_tables_that_the_code_uses(make_database: MakeDatabase) -> None:
    database = make_database()
    with database._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_what_is_changed_is_there_for_the_next_process(make_database: MakeDatabase) -> None:
    first = make_database()
    limits = Limits(requests_per_minute=5, tokens_per_minute=1000, max_concurrency=2, weight=2.5)
    key = first.add_tenant("acme", limits, ["red", "blue-*"])
    admin = first.add_key(None)
    assert first.add_version("acme", "own", content("a" * 64, template="{{ x }}")).number == 1
    assert first.add_version("acme", "own", content("b" * 64)).number == 2
    first.set_weights("acme", "own", {1: 0.9, 2: 0.1})
    second = make_database()
    assert second.snapshot == first.snapshot
    tenant = second.snapshot.tenants["acme"]
    assert tenant.limits == limits
    assert tenant.may_name("red") and tenant.may_name("blue-2") and not tenant.may_name("redder")
    assert {one.id: one.tenant for one in second.snapshot.keys.values()} == {key.id: "acme", admin.id: None}
    adapter = second.snapshot.adapters["acme", "own"]
    assert adapter.weights == {1: 0.9, 2: 0.1} and adapter.versions[1].template == "{{ x }}"
    assert make_database("another base").snapshot.adapters == {}


def test_a_change_of_one_process_is_seen_by_the_others(make_database: MakeDatabase) -> None:
    one, other = make_database(), make_database()
    assert not other.refresh()
    key = one.add_tenant("acme", Limits(), ["*"])
    assert other.refresh() and key.id in other.snapshot.keys
    one.remove_key("acme", key.id)
    assert other.refresh() and not other.snapshot.keys and not other.refresh()


def test_keys_are_kept_as_salted_hashes_only(make_database: MakeDatabase, database_url: str) -> None:
    database = make_database()
    database.add_tenant("acme", Limits(), ["*"])
    keys = [database.add_key("acme") for _ in range(3)]
    assert len({key.salt for key in keys}) == len({key.digest for key in keys}) == 3
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        dump = repr(connection.execute(sa.select(tables.keys)).all())
    engine.dispose()
    for key in keys:
        parsed = parse(key.text)
        assert parsed is not None and parsed[0] == key.id
        assert parsed[1] not in dump and key.text not in dump
        kept = database.snapshot.keys[key.id]
        assert matches(parsed[1], kept.salt, kept.digest)
        assert not matches(parsed[1][:-1] + "~", kept.salt, kept.digest)


def test_what_is_no_key_is_told_before_any_comparison() -> None:
    good = new_key().text
    for bad in ("", "sk-123", good[:-1], good + "a", good.replace("pk_", "pk-"), f" {good}", "pk_é_" + "a" * 43):
        assert parse(bad) is None


def test_versions_count_on_and_the_alias_follows_and_goes_back(make_database: MakeDatabase) -> None:
    database = make_database()

    def weights() -> dict[int, float]:
        return database.snapshot.adapters[SHARED, "a"].weights

    for number in (1, 2, 3):
        assert database.add_version(SHARED, "a", content(str(number) * 64)).number == number
        assert weights() == {number: 1.0}
    database.set_weights(SHARED, "a", {3: 0.5, 1: 0.5})
    for expected in ({3: 1.0}, {2: 1.0}, {1: 1.0}):
        database.roll_back(SHARED, "a")
        assert weights() == expected
    with pytest.raises(InputError, match="nothing to roll back"):
        database.roll_back(SHARED, "a")
    with pytest.raises(InputError, match="gets requests"):
        database.remove_version(SHARED, "a", 1)
    database.remove_version(SHARED, "a", 3)
    assert set(database.snapshot.adapters[SHARED, "a"].versions) == {1, 2}
    database.remove_adapter(SHARED, "a")
    assert not database.snapshot.adapters
    assert database.add_version(SHARED, "a", content()).number == 4, "a number is never used again"


def test_a_removed_version_is_no_place_to_roll_back_to(make_database: MakeDatabase) -> None:
    database = make_database()
    for number in (1, 2, 3):
        database.add_version(SHARED, "a", content(str(number) * 64))
    database.remove_version(SHARED, "a", 2)
    database.roll_back(SHARED, "a")
    assert database.snapshot.adapters[SHARED, "a"].weights == {1: 1.0}


def test_a_tenants_number_and_bytes_of_adapters_are_bounded(make_database: MakeDatabase) -> None:
    database = make_database()
    database.add_tenant("acme", Limits(max_adapters=2, max_adapter_bytes=350), ["*"])
    database.add_version("acme", "a", content())
    database.add_version("acme", "b", content())
    with pytest.raises(QuotaExceeded, match="2 adapters"):
        database.add_version("acme", "c", content())
    database.add_version("acme", "a", content("e" * 64))
    with pytest.raises(QuotaExceeded, match="350 bytes"):
        database.add_version("acme", "a", content("f" * 64))
    database.add_version(SHARED, "free", content(nbytes=10**12))
    assert len(database.snapshot.owned("acme")) == 2


def test_a_removed_tenant_takes_its_keys_and_adapters_along(make_database: MakeDatabase) -> None:
    database = make_database()
    for name in ("acme", "other"):
        database.add_tenant(name, Limits(), ["*"])
        database.add_version(name, "own", content())
    with pytest.raises(NameInUse):
        database.add_tenant("acme", Limits(), [])
    database.remove_tenant("acme")
    left = database.snapshot
    assert set(left.tenants) == {"other"} and set(left.adapters) == {("other", "own")}
    assert {key.tenant for key in left.keys.values()} == {"other"}
    for action in (lambda: database.remove_tenant("acme"), lambda: database.add_key("acme")):
        with pytest.raises(InputError, match="no tenant 'acme'"):
            action()


def test_processes_that_change_at_the_same_time_lose_nothing(make_database: MakeDatabase, database_url: str) -> None:
    databases = [make_database() for _ in range(4)]
    databases[0].add_version(SHARED, "a", content())

    def work(database: Database) -> None:
        for _ in range(5):
            database.add_version(SHARED, "a", content())

    threads = [threading.Thread(target=work, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    databases[0].refresh()
    assert set(databases[0].snapshot.adapters[SHARED, "a"].versions) == set(range(1, 22))


WRITER = """
import sys
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.records import Limits
database = Database(sys.argv[1], "base")
for number in range(10_000):
    key = database.add_tenant(f"t{number}", Limits(), ["*"])
    fields = {"uid": "u", "kind": "lora", "rank": 1, "num_virtual": 0, "template": None}
    version = database.add_version(f"t{number}", "a", {"digest": "d", "nbytes": 1, **fields})
    print(f"t{number} {key.id} {version.number}", flush=True)
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_answered(
    make_database: MakeDatabase, database_url: str, seed: int
) -> None:
    rng = random.Random(seed)
    make_database()
    answered: list[list[str]] = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, database_url], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first = process.stdout.readline().split()
        time.sleep(rng.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        lines = [first, *(line.split() for line in process.stdout.read().splitlines(keepends=True) if line[-1] == "\n")]
        process.wait()
        database = make_database()
        for name, key_id, version in lines:
            assert database.snapshot.keys[key_id].tenant == name
            assert int(version) in database.snapshot.adapters[name, "a"].versions
        answered += lines
        for tenant in list(database.snapshot.tenants):
            database.remove_tenant(tenant)
    assert len(answered) >= 3


@pytest.mark.parametrize("bad", ["nonsense", "sqlite:////proc/no/such/place.db", "postgresql://127.0.0.1:1/none"])
def test_an_address_that_cant_be_used_is_refused_in_one_line(bad: str) -> None:
    with pytest.raises(InputError, match="--db") as caught:
        Database(bad)
    assert "\n" not in str(caught.value) and caught.value.field == "db"
