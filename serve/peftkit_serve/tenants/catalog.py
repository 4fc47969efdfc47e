"""The adapters that requests can name: who may name what, which version answers, and how new ones come in.

    name            the version that its weights choose
    name@version    that version
    base:name       the same as name

A tenant sees its own adapters and the shared ones that are open to it; every other one is as if it weren't there. The
shared ones are those that came over HTTP and those of the watched folder, which hide the others' names and belong to
that folder alone: a server that watches another one, or none, doesn't see them.

An adapter that comes in is read, checked and packed as serving does it before its version is written down, so a request
never meets a bad one. Several come in at a time; their versions are written down in turn.
"""

import asyncio
import random
import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from peftkit.artifact import read_adapter
from peftkit.errors import InputError
from peftkit_serve.async_engine import ServedEngine
from peftkit_serve.templates.renderer import Templates
from peftkit_serve.tenants.content import Arrival, Contents, template_of
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.names import check_name
from peftkit_serve.tenants.records import SHARED, Adapter, Tenant, Version, owner_of_watched
from peftkit_serve.tenants.shelf import Shelf

T = TypeVar("T")

MAX_WEIGHT = 1e6
"""Largest weight of a version: any number of them has a finite sum."""
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_MAX_UNPACKING = 4
"""Adapters that are unpacked and read at a time: that many threads, and no more, are lost to large ones."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request's `model` came to."""

    adapter: Adapter
    version: Version


class NotThere(InputError):
    """There is no such adapter for who asks."""


class Reserved(InputError):
    """A name that can't be given."""


class Catalog:
    """The adapters of one base. Used on one event loop; what blocks runs on threads."""

    def __init__(
        self,
        engine: ServedEngine,
        database: Database,
        contents: Contents,
        shelf: Shelf,
        templates: Templates,
        served_name: str,
        watched: Path | None = None,
    ) -> None:
        """
        templates: where an adapter's own chat template is tried.
        served_name: what the base is called. It and the names of adapters that `engine` has already are taken: a shared
            adapter of the database that is called so is as if it weren't there.
        watched: the folder that shared adapters may come from, by `watched_owner`.
        """
        self._engine, self._database, self._contents, self.shelf = engine, database, contents, shelf
        self._templates = templates
        self._served_name = served_name
        self._reserved = frozenset((served_name, *engine.adapters.names()))
        self.watched_owner = None if watched is None else owner_of_watched(watched)
        """Whose the watched folder's adapters are."""
        self._random = random.SystemRandom()
        self._lock = asyncio.Lock()  # one change of adapters at a time
        self._unpacking = asyncio.Semaphore(_MAX_UNPACKING)
        self._tasks: set[asyncio.Task[Any]] = set()

    def visible(self, tenant: Tenant | None) -> list[Adapter]:
        """Adapters that a tenant, or with None the operator, can name. A tenant's own hides a shared one."""
        shared = self.list_owned(SHARED)
        if tenant is None:
            return shared
        found = {adapter.name: adapter for adapter in shared if tenant.may_name(adapter.name)}
        found |= {adapter.name: adapter for adapter in self.list_owned(tenant.name)}
        return [found[name] for name in sorted(found) if name != self._served_name]

    def choose(self, tenant: Tenant | None, model: str) -> Chosen | None:
        """The version that answers a request for `model`; None where there is none for this tenant."""
        name, marked, number = model.partition("@")
        adapter = self.find(tenant, name)
        if adapter is None:
            return None
        if marked:
            version = adapter.versions.get(int(number)) if _VERSION.fullmatch(number) else None
            return None if version is None else Chosen(adapter, version)
        numbers = list(adapter.weights)
        number = self._random.choices(numbers, [adapter.weights[one] for one in numbers])[0]
        return Chosen(adapter, adapter.versions[number])

    def find(self, tenant: Tenant | None, name: str) -> Adapter | None:
        """The adapter that a tenant means by a name."""
        adapters = self._database.snapshot.adapters
        if tenant is not None:
            if (tenant.name, name) in adapters:
                return adapters[tenant.name, name]
            if not tenant.may_name(name):
                return None
        return None if name in self._reserved else self._shared(name)

    def owned(self, owner: str, name: str) -> Adapter:
        """An owner's adapter. Raises NotThere, Reserved for a name that the server was started with."""
        if owner == SHARED and name in self._reserved:
            raise Reserved(f"'{name}' stays as it is: the server was started with it", field="name")
        adapter = self._shared(name) if owner == SHARED else self._database.snapshot.adapters.get((owner, name))
        if adapter is None:
            raise NotThere(f"there is no adapter '{name[:128]}'", field="name")
        return adapter

    def list_owned(self, owner: str) -> list[Adapter]:
        """An owner's adapters by name."""
        owned = self._database.snapshot.owned(owner)
        if owner != SHARED:
            return owned
        watched = [] if self.watched_owner is None else self._database.snapshot.owned(self.watched_owner)
        found = {adapter.name: adapter for adapter in (*owned, *watched)}
        return [found[name] for name in sorted(found) if name not in self._reserved]

    def all_versions(self) -> list[Version]:
        """Of all owners' adapters."""
        return [
            version for adapter in self._database.snapshot.adapters.values() for version in adapter.versions.values()
        ]

    async def publish(self, owner: str, name: str, fill: Callable[[Arrival], None], *, known: bool = True) -> Version:
        """A new version of `name`, of the files that `fill` writes, once it is known that it can be served.

        known: whether a version is made of content that the last version has already. Raises InputError for a name
        or limit, AdapterError and its children for what can't be served; then nothing has changed.
        """
        check_name(name)
        self._check_free(owner, name)
        return await self._to_its_end(self._publish(owner, name, fill, known=known))

    async def set_weights(self, owner: str, name: str, weights: dict[int, float]) -> Adapter:
        """Sends shares of a name's requests to versions; they are made to sum to 1."""
        adapter = self.owned(owner, name)
        for number, share in weights.items():
            if number not in adapter.versions:
                raise NotThere(f"there is no adapter '{name}@{number}'", field="weights")
            if not 0 < share <= MAX_WEIGHT:
                message = f"weights.{number} is {share}: it must be above 0 and at most {MAX_WEIGHT:.0f}, or left out"
                raise InputError(message, field="weights")
        total = sum(weights.values())
        shares = {number: share / total for number, share in sorted(weights.items())}
        for number, share in shares.items():
            if not share:
                message = f"weights.{number} is too small beside the others to get any request: leave it out"
                raise InputError(message, field="weights")
        await asyncio.to_thread(self._database.set_weights, adapter.owner, name, shares)
        return self.owned(owner, name)

    async def roll_back(self, owner: str, name: str) -> Adapter:
        """The weights before."""
        adapter = self.owned(owner, name)
        await asyncio.to_thread(self._database.roll_back, adapter.owner, name)
        return self.owned(owner, name)

    async def remove(self, owner: str, name: str, number: int | None = None) -> int:
        """Removes a name, or one version of it, waits for its requests to end; returns the bytes of memory freed.

        Raises NotThere, Reserved for what the watched folder would bring again."""
        async with self._lock:
            adapter = self.owned(owner, name)
            if number is not None and number not in adapter.versions:
                raise NotThere(f"there is no adapter '{name}@{number}'", field="name")
            whole = number is None or set(adapter.versions) == {number}
            if whole and adapter.owner == self.watched_owner:
                message = f"'{name}' comes from the watched folder: remove its folder there, and it goes"
                raise Reserved(message, field="name")
            gone = await self._take_away(adapter, None if whole else number)
        return await self._free(gone)

    async def remove_watched(self, name: str) -> None:
        """Removes a name whose folder is gone, and frees it when its requests have ended."""
        async with self._lock:
            adapter = self._database.snapshot.adapters.get((self.watched_owner or SHARED, name))
            if adapter is None or adapter.owner != self.watched_owner:  # another server was first
                return
            gone = await self._take_away(adapter, None)
        self._begin(self._free(gone))

    async def remove_tenant(self, name: str) -> None:
        """Removes a tenant with its keys and adapters, waits for their requests to end, and frees what they held."""
        async with self._lock:
            gone = _digests(self.list_owned(name))
            await asyncio.to_thread(self._contents.doubt, gone)
            await asyncio.to_thread(self._database.remove_tenant, name)
        await self._free(gone)

    async def refresh(self) -> None:
        """Sees what other processes have changed, and frees what they have removed."""
        before = self._database.snapshot
        if await asyncio.to_thread(self._database.refresh):
            gone = _digests(before.adapters.values()) - _digests(self._database.snapshot.adapters.values())
            self._begin(self._free(gone))  # which waits for the requests that use them

    async def tidy(self) -> None:
        """Frees what processes that were killed have left."""
        await self._free(await asyncio.to_thread(self._contents.unsettled))

    def names_of(self, engine_name: str) -> list[str]:
        """Under which names an adapter of the engine is known, as owner/name for a tenant's own."""
        digest = self.shelf.digest_of(engine_name)
        if digest == engine_name:
            return [engine_name]
        return [
            f"{adapter.tenant}/{adapter.name}" if adapter.tenant else adapter.name
            for adapter in self._database.snapshot.adapters.values()
            if any(version.digest == digest for version in adapter.versions.values())
        ]

    def _shared(self, name: str) -> Adapter | None:
        """What a name means to the operator, and to tenants to whom it is open."""
        adapters = self._database.snapshot.adapters
        watched = None if self.watched_owner is None else adapters.get((self.watched_owner, name))
        return watched or adapters.get((SHARED, name))

    def _check_free(self, owner: str, name: str) -> None:
        if name == self._served_name:
            raise Reserved(f"'{name}' is taken: it is the base's name", field="name")
        if owner in (SHARED, self.watched_owner) and name in self._reserved:
            raise Reserved(f"'{name}' is taken: the server was started with it", field="name")
        if owner == SHARED and (self.watched_owner, name) in self._database.snapshot.adapters:
            raise Reserved(f"'{name}' comes from the watched folder: put the new version there", field="name")

    async def _publish(self, owner: str, name: str, fill: Callable[[Arrival], None], *, known: bool) -> Version:
        async with self._unpacking:
            content = await asyncio.to_thread(self._take_in, fill)
        digest = str(content["digest"])
        try:
            last = self._last(owner, name)
            if not known and last is not None and last.digest == digest:
                return last
            if template := self._templates.own(content["template"]):
                await self._templates.check(template)
            async with self.shelf.hold(digest) as entry:
                content |= {"kind": entry.kind, "rank": entry.rank, "num_virtual": entry.num_virtual}
            async with self._lock:
                self._check_free(owner, name)  # others may have come meanwhile
                return await asyncio.to_thread(self._database.add_version, owner, name, content)
        except Exception as error:
            raise _without_place(error, self.shelf.folder(digest)) from None
        finally:
            self._contents.release(digest)
            await self._free({digest})

    async def _take_away(self, adapter: Adapter, number: int | None) -> set[str]:
        """Removes a name, or one version, from the database; the content that it had."""
        gone = {version.digest for version in adapter.versions.values() if number in (None, version.number)}
        await asyncio.to_thread(self._contents.doubt, gone)
        if number is None:
            await asyncio.to_thread(self._database.remove_adapter, adapter.owner, adapter.name)
        else:
            await asyncio.to_thread(self._database.remove_version, adapter.owner, adapter.name, number)
        return gone

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a change that goes on when who waits for it goes away: threads can't be stopped half-way."""
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _last(self, owner: str, name: str) -> Version | None:
        adapter = self._database.snapshot.adapters.get((owner, name))
        return None if adapter is None else adapter.versions[max(adapter.versions)]

    def _take_in(self, fill: Callable[[Arrival], None]) -> dict[str, Any]:
        """Files that are an adapter of this base, kept; the fields of a version that they decide."""
        with self._contents.arriving() as arrival:
            fill(arrival)
            record = arrival.check()
            uid = _read(arrival.folder, self._engine)
            digest, num_bytes = arrival.digest()
            self._contents.keep(arrival, digest)
        return {
            "digest": digest,
            "uid": uid,
            "nbytes": num_bytes,
            "template": template_of(record),
        }

    async def _free(self, digests: Iterable[str]) -> int:
        """Frees memory and disk of content that no version has any more, after the requests that use it; returns the
        bytes of memory."""
        freed = 0
        for digest in sorted(digests):
            if not self._is_wanted(digest):
                freed += await self.shelf.drop(digest)
            async with self._lock:  # no version comes between the look and the removal
                await asyncio.to_thread(self._contents.settle, digest, keep=self._is_wanted(digest))
        return freed

    def _is_wanted(self, digest: str) -> bool:
        return self._database.snapshot.references(digest) > 0 or self._contents.is_held(digest)


def _digests(adapters: Iterable[Adapter]) -> set[str]:
    return {version.digest for adapter in adapters for version in adapter.versions.values()}


def _read(folder: Path, engine: ServedEngine) -> str:
    """The uid of an adapter's folder."""
    try:
        return read_adapter(folder, base=engine.base).uid
    except InputError as error:
        raise _without_place(error, folder) from None


def _without_place(error: Exception, folder: Path) -> Exception:
    """The error, which names an adapter's files without the place where they lie."""
    if not isinstance(error, InputError):
        return error
    message = str(error).replace(f"{folder}/", "").replace(str(folder), "the adapter")
    return type(error)(message, field=error.field)
