"""Adapters in host memory: loaded when a request first needs them, put away when others need the room.

disk ──load: once, however many ask──▶ host ⇄ gpu (the engine's own business)
 ▲                                      │
 └────── put away: the least recently used that nobody holds, above the byte budget ──────┘
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peftkit.errors import InputError, PeftkitError
from peftkit_serve.adapters.store import AdapterEntry
from peftkit_serve.async_engine import ServedEngine

logger = logging.getLogger(__name__)

Tier = Literal["gpu", "host", "disk"]


@dataclass(slots=True, eq=False)
class _Place:
    """An adapter that is loaded or being loaded."""

    name: str
    """In the engine."""
    loading: asyncio.Task[AdapterEntry]
    num_holds: int = 0
    last_use: float = 0.0
    load_ms: float = 0.0
    nbytes: int = 0


class Shelf:
    """The engine's adapters by the digest of their files. Used on one event loop.

    In the engine each load has a name of its own, so that one may begin while the last one still drains.
    """

    def __init__(self, engine: ServedEngine, root: Path, *, max_bytes: int) -> None:
        """
        root: the folder of a digest is `root / digest`.
        max_bytes: host memory for adapters that nobody uses at the moment.
        """
        self._engine = engine
        self._root = root
        self._max_bytes = max_bytes
        self._places: dict[str, _Place] = {}
        self._past_uses: dict[str, tuple[float, float]] = {}
        self._num_places = self.num_loads = self.num_evictions = 0
        self.load_seconds = 0.0

    def folder(self, digest: str) -> Path:
        """Where the files of a digest lie."""
        return self._root / digest

    @asynccontextmanager
    async def hold(self, digest: str) -> AsyncGenerator[AdapterEntry, None]:
        """Loads an adapter, if it isn't loaded, and keeps it there. Raises what loading it raises."""
        place = self._places.get(digest)
        if place is None:
            self._num_places += 1
            name = f"{digest}.{self._num_places}"
            place = self._places[digest] = _Place(name, asyncio.create_task(self._load(digest, name)))
        place.num_holds += 1
        try:
            # one that goes away must not take the load from the others who wait for it
            yield await asyncio.shield(place.loading)
        finally:
            place.num_holds -= 1
            place.last_use = time.time()
            if place.loading.done():
                await self._make_room()

    async def drop(self, digest: str) -> int:
        """Takes an adapter out when its requests have ended; returns the bytes that this frees."""
        place = self._places.pop(digest, None)
        if place is None:
            return 0
        try:
            await asyncio.shield(place.loading)
            entry = await self._engine.remove_adapter(place.name)
            return 0 if self._is_named(entry.uid) else entry.nbytes
        except PeftkitError:  # it was never loaded, or the engine has ended and its memory with it
            return 0

    def tier(self, digest: str) -> Tier:
        """Where it lies now."""
        entry = self._entry(digest)
        return "disk" if entry is None else "gpu" if entry.resident else "host"

    def references(self, digest: str) -> int:
        """Requests that use it."""
        entry = self._entry(digest)
        return 0 if entry is None else entry.references

    def last_use(self, digest: str) -> float | None:
        """Seconds since 1970 when the last request with it ended; None before the first since the server began."""
        place = self._places.get(digest)
        return (place.last_use if place else self._past_uses.get(digest, (0.0, 0.0))[0]) or None

    def load_ms(self, digest: str) -> float | None:
        """How long it took to load; None before that since the server began."""
        place = self._places.get(digest)
        return (place.load_ms if place else self._past_uses.get(digest, (0.0, 0.0))[1]) or None

    def memory_bytes(self, digest: str) -> int:
        """Bytes that it takes in host memory now."""
        place = self._places.get(digest)
        return 0 if place is None else place.nbytes

    def digest_of(self, engine_name: str) -> str:
        """The digest of one of the engine's names; the name itself for an adapter that isn't the shelf's."""
        return (
            engine_name.rpartition(".")[0]
            if engine_name in {one.name for one in self._places.values()}
            else engine_name
        )

    @property
    def num_loaded(self) -> int:
        """Adapters in host memory."""
        return len(self._places)

    async def _load(self, digest: str, name: str) -> AdapterEntry:
        start = time.monotonic()
        try:
            entry = await self._engine.add_adapter(name, self.folder(digest))
        except BaseException:
            if digest in self._places and self._places[digest].name == name:
                del self._places[digest]
            raise
        place = self._places.get(digest)
        if place is None or place.name != name:  # dropped while it was loaded
            return entry
        place.load_ms, place.nbytes = 1000 * (time.monotonic() - start), entry.nbytes
        self.num_loads += 1
        self.load_seconds += place.load_ms / 1000
        return entry

    async def _make_room(self) -> None:
        """Puts unused adapters away until the rest fits."""
        unused = sorted(
            (place.last_use, digest)
            for digest, place in self._places.items()
            if not place.num_holds and place.loading.done()
        )
        total = sum(place.nbytes for place in self._places.values())
        for _, digest in unused:
            if total <= self._max_bytes:
                return
            place = self._places.pop(digest)
            total -= place.nbytes
            self._past_uses[digest] = (place.last_use, place.load_ms)
            self.num_evictions += 1
            try:
                await self._engine.remove_adapter(place.name)
            except PeftkitError as error:
                logger.warning({"adapter_not_put_away": digest, "reason": type(error).__name__})

    def _is_named(self, uid: str) -> bool:
        """Whether the engine has the same weights under another name: they came with other files, or from the start."""
        adapters = self._engine.adapters
        for name in adapters.names():
            try:
                if adapters.uid(name) == uid:
                    return True
            except InputError:  # removed meanwhile
                continue
        return False

    def _entry(self, digest: str) -> AdapterEntry | None:
        place = self._places.get(digest)
        if place is None:
            return None
        try:
            return self._engine.adapters.get(place.name)
        except InputError:  # being loaded, or just removed
            return None
