"""The adapters that requests can name: who may name what, which version answers, and how new ones come in.

    name            the version that its weights choose
    name@version    that version
    base:name       the same as name

A tenant sees its own adapters and the shared ones that are open to it; every other one is as if it weren't there. An
adapter that comes in is read, checked and packed as serving does it before its version is written down, so a request
never meets a bad one.
"""

import asyncio
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftkit.artifact import read_adapter
from peftkit.errors import InputError
from peftkit_serve.async_engine import AsyncEngine
from peftkit_serve.tenants.content import Arrival, Contents, template_of
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.names import check_name
from peftkit_serve.tenants.records import SHARED, Adapter, Tenant, Version
from peftkit_serve.tenants.shelf import Shelf

MAX_WEIGHT = 1e6
"""Largest weight of a version: any number of them has a finite sum."""
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


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
        engine: AsyncEngine,
        database: Database,
        contents: Contents,
        shelf: Shelf,
        served_name: str,
    ) -> None:
        """served_name: what the base is called. It and the names of adapters that `engine` has already are taken: a
        shared adapter of the database that is called so is as if it weren't there."""
        self._engine, self._database, self._contents, self.shelf = engine, database, contents, shelf
        self._served_name = served_name
        self._reserved = frozenset((served_name, *engine.engine.adapters.names()))
        self._random = random.SystemRandom()
        self._lock = asyncio.Lock()  # one change of adapters at a time
        self._freeing: set[asyncio.Task[int]] = set()

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
        return None if name in self._reserved else adapters.get((SHARED, name))

    def owned(self, owner: str, name: str) -> Adapter:
        """An owner's adapter. Raises NotThere, Reserved for a name that the server was started with."""
        if owner == SHARED and name in self._reserved:
            raise Reserved(f"'{name}' stays as it is: the server was started with it", field="name")
        adapter = self._database.snapshot.adapters.get((owner, name))
        if adapter is None:
            raise NotThere(f"there is no adapter '{name[:128]}'", field="name")
        return adapter

    def list_owned(self, owner: str) -> list[Adapter]:
        """An owner's adapters by name."""
        owned = self._database.snapshot.owned(owner)
        return owned if owner != SHARED else [adapter for adapter in owned if adapter.name not in self._reserved]

    async def publish(self, owner: str, name: str, fill: Callable[[Arrival], None], *, known: bool = True) -> Version:
        """A new version of `name`, of the files that `fill` writes, once it is known that it can be served.

        known: whether a version is made of content that the last version has already. Raises InputError for a name
        or limit, AdapterError and its children for what can't be served; then nothing has changed.
        """
        check_name(name)
        if name == self._served_name:
            raise Reserved(f"'{name}' is taken: it is the base's name", field="name")
        if owner == SHARED and name in self._reserved:
            raise Reserved(f"'{name}' is taken: the server was started with it", field="name")
        async with self._lock:
            content = await asyncio.to_thread(self._take_in, fill)
            digest = str(content["digest"])
            last = self._last(owner, name)
            if known or last is None or last.digest != digest:
                try:
                    async with self.shelf.hold(digest) as entry:
                        content |= {"kind": entry.kind, "rank": entry.rank, "num_virtual": entry.num_virtual}
                    number = await asyncio.to_thread(self._database.add_version, owner, name, content)
                except Exception as error:  # not when it is cancelled: the database's change may still come
                    await self._settle({digest})
                    raise _without_place(error, self.shelf.folder(digest)) from None
                last = self._database.snapshot.adapters[owner, name].versions[number]
            await self._settle({digest})
            return last

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
        await asyncio.to_thread(self._database.set_weights, owner, name, shares)
        return self.owned(owner, name)

    async def roll_back(self, owner: str, name: str) -> Adapter:
        """The weights before."""
        self.owned(owner, name)
        await asyncio.to_thread(self._database.roll_back, owner, name)
        return self.owned(owner, name)

    async def remove(self, owner: str, name: str, number: int | None = None) -> int:
        """Removes a name, or one version of it, waits for its requests to end; returns the bytes of memory freed."""
        async with self._lock:
            adapter = self.owned(owner, name)
            if number is not None and number not in adapter.versions:
                raise NotThere(f"there is no adapter '{name}@{number}'", field="name")
            gone = {version.digest for version in adapter.versions.values() if number in (None, version.number)}
            await asyncio.to_thread(self._contents.doubt, gone)
            if number is None or set(adapter.versions) == {number}:
                await asyncio.to_thread(self._database.remove_adapter, owner, name)
            else:
                await asyncio.to_thread(self._database.remove_version, owner, name, number)
        return await self._free(gone)

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
            task = asyncio.create_task(self._free(gone))  # which waits for the requests that use them
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def tidy(self) -> None:
        """Frees what processes that were killed have left."""
        await self._settle(await asyncio.to_thread(self._contents.unsettled))

    def names_of(self, engine_name: str) -> list[str]:
        """Under which names an adapter of the engine is known, as owner/name for a tenant's own."""
        digest = self.shelf.digest_of(engine_name)
        if digest == engine_name:
            return [engine_name]
        return [
            f"{adapter.owner}/{adapter.name}" if adapter.owner else adapter.name
            for adapter in self._database.snapshot.adapters.values()
            if any(version.digest == digest for version in adapter.versions.values())
        ]

    def _last(self, owner: str, name: str) -> Version | None:
        adapter = self._database.snapshot.adapters.get((owner, name))
        return None if adapter is None else adapter.versions[max(adapter.versions)]

    def _take_in(self, fill: Callable[[Arrival], None]) -> dict[str, Any]:
        """Files that are an adapter of this base, kept; the fields of a version that they decide."""
        with self._contents.arriving() as arrival:
            fill(arrival)
            record = arrival.check()
            uid = _read(arrival.folder, self._engine)
            digest, num_bytes = self._contents.keep(arrival)
        return {
            "digest": digest,
            "uid": uid,
            "nbytes": num_bytes,
            "template": template_of(record),
        }

    async def _free(self, digests: set[str]) -> int:
        """Frees memory and disk of content that no version has any more; returns the bytes of memory."""
        freed = 0
        for digest in sorted(digests):
            if not self._database.snapshot.references(digest):
                freed += await self.shelf.drop(digest)
        async with self._lock:  # nobody brings it again meanwhile
            await self._settle(digests)
        return freed

    async def _settle(self, digests: Iterable[str]) -> None:
        """Removes the files of content that no version has, after what was done to its versions."""
        for digest in digests:
            kept = self._database.snapshot.references(digest) > 0
            if not kept:
                await self.shelf.drop(digest)
            await asyncio.to_thread(self._contents.settle, digest, keep=kept)


def _digests(adapters: Iterable[Adapter]) -> set[str]:
    return {version.digest for adapter in adapters for version in adapter.versions.values()}


def _read(folder: Path, engine: AsyncEngine) -> str:
    """The uid of an adapter's folder."""
    try:
        return read_adapter(folder, base=engine.engine.base).uid
    except InputError as error:
        raise _without_place(error, folder) from None


def _without_place(error: Exception, folder: Path) -> Exception:
    """The error, which names an adapter's files without the place where they lie."""
    if not isinstance(error, InputError):
        return error
    message = str(error).replace(f"{folder}/", "").replace(str(folder), "the adapter")
    return type(error)(message, field=error.field)
