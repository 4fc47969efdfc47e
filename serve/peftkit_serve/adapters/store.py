"""The names that requests give adapters: name → version → uid, in memory.

    add:     registered ──▶ loading ──▶ ready ⇄ failed        (a folder that can't be served registers nothing)
    remove:  the name is gone at once ──▶ draining while requests run ──▶ gone, memory freed

Reading a folder happens on the loader's thread; `register` and `remove` change the pool and belong to the thread that
steps. Everything else may be called from any thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from peftkit.artifact import NAME
from peftkit.errors import InputError, RunError, did_you_mean
from peftkit.methods import LoraConfig
from peftkit_serve.adapters.loader import AdapterLoader, LoadedAdapter
from peftkit_serve.adapters.pool import AdapterPool

AdapterState = Literal["ready", "failed", "draining", "gone"]


class NameTaken(InputError):
    """An adapter of this name is registered already."""


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """What is known of an adapter under one of its names, at the moment of asking."""

    name: str
    version: int
    """1 for the first adapter of this name, counted on when the name is used again."""
    uid: str
    state: AdapterState
    path: Path
    kind: str
    """Its method, or both of them with a plus between."""
    record: dict[str, Any]
    """What `peftkit.json` says of its making."""
    rank: int
    """LoRA's rank, the largest of a rank_pattern; 0 for other kinds."""
    num_virtual: int
    """Virtual tokens; 0 for kinds without."""
    nbytes: int
    """Bytes of its weights."""
    resident: bool
    """Whether it is on the device; else it is in host memory and comes when a request needs it."""
    references: int
    """Requests that have not ended, under all names of this content."""


@dataclass(slots=True, eq=False)
class Ticket:
    """An adapter that is being loaded under a reserved name, and afterwards the registered one."""

    name: str
    path: Path
    future: Future[LoadedAdapter]
    version: int = 0
    """0 until it is registered."""

    @property
    def state(self) -> Literal["registered", "loading", "ready"]:
        """How far it is: waiting for the loader, being loaded, or known to requests."""
        if self.version:
            return "ready"
        return "loading" if self.future.running() or self.future.done() else "registered"


class AdapterStore:
    """`engine.adapters`: adds, removes and finds adapters by name."""

    def __init__(self, loader: AdapterLoader, pool: AdapterPool) -> None:
        self._loader = loader
        self._pool = pool
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._versions: dict[str, int] = {}

    def add(self, name: str, path: str | Path) -> AdapterEntry:
        """Loads an adapter folder and registers it under `name`; returns when requests can name it.

        Raises InputError (field "name") for a name that is malformed, NameTaken for one in use, AdapterError or its
        children for a folder that can't be served faithfully. Then nothing is registered.
        """
        ticket = self.begin(name, path)
        try:
            return self.register(ticket)
        except BaseException:
            self.cancel(ticket)
            raise

    def add_loaded(self, name: str, loaded: LoadedAdapter) -> AdapterEntry:
        """Registers an adapter that is in host memory already. Raises as `add` does for the name."""
        future: Future[LoadedAdapter] = Future()
        future.set_result(loaded)
        return self.register(self._reserve(name, Path(name), lambda: future))

    def begin(self, name: str, path: str | Path) -> Ticket:
        """Reserves a name and starts to load; `register` or `cancel` must follow."""
        return self._reserve(name, Path(path), lambda: self._loader.submit(path))

    def _reserve(self, name: str, path: Path, load: Callable[[], Future[LoadedAdapter]]) -> Ticket:
        if not NAME.fullmatch(name):
            raise InputError(
                f"{name[:140]!r} can't be an adapter's name: use 1 to 128 letters, digits, '.', '_' and '-', "
                "not dots alone",
                field="name",
            )
        with self._lock:
            if name in self._tickets:
                raise NameTaken(f"an adapter named '{name}' exists already: remove it first", field="name")
            ticket = self._tickets[name] = Ticket(name, path, load())
        return ticket

    def register(self, ticket: Ticket) -> AdapterEntry:
        """Waits for the load and makes the name known to requests.

        Raises what the load raised, RunError for one that was cancelled.
        """
        loaded = ticket.future.result()
        with self._lock:
            if self._tickets.get(ticket.name) is not ticket:
                raise RunError(f"loading adapter '{ticket.name}' was cancelled")
            self._pool.add_name(loaded)
            ticket.version = self._versions[ticket.name] = self._versions.get(ticket.name, 0) + 1
        return self._entry(ticket, loaded)

    def cancel(self, ticket: Ticket) -> None:
        """Gives the name of a load that came to nothing free again; a registered one is left alone."""
        ticket.future.cancel()
        with self._lock:
            if not ticket.version and self._tickets.get(ticket.name) is ticket:
                del self._tickets[ticket.name]

    def remove(self, name: str) -> AdapterEntry:
        """Takes the name away at once; requests that have it run on, and then its memory is freed.

        Raises InputError (field "name") for an unknown name.
        """
        with self._lock:
            ticket = self._ready(name, "name")
            del self._tickets[name]
            loaded = ticket.future.result()
            entry = self._entry(ticket, loaded)
            self._pool.drop_name(loaded.uid)
        state: AdapterState = "draining" if self.is_draining(loaded.uid) else "gone"
        return replace(entry, state=state)

    def is_draining(self, uid: str) -> bool:
        """Whether an adapter without a name is still held by requests."""
        return self._pool.state(uid) == "draining"

    def names(self) -> list[str]:
        """Names that requests can give, in the order in which they were registered."""
        with self._lock:
            return [name for name, ticket in self._tickets.items() if ticket.version]

    def get(self, name: str) -> AdapterEntry:
        """What is known of a name. Raises InputError (field "model") for an unknown one."""
        with self._lock:
            ticket = self._ready(name, "model")
        return self._entry(ticket, ticket.future.result())

    def uid(self, name: str) -> str:
        """The content that a name points to now. Raises InputError (field "model") for an unknown one."""
        return self.find(name).uid

    def find(self, name: str) -> LoadedAdapter:
        """The adapter that a request means. Raises InputError (field "model") for an unknown name."""
        with self._lock:
            return self._ready(name, "model").future.result()

    def _ready(self, name: str, field: str) -> Ticket:
        ticket = self._tickets.get(name)
        if ticket is None:
            hint = did_you_mean(name, [known for known, one in self._tickets.items() if one.version])
            raise InputError(f"there is no adapter named '{name[:140]}'{hint}", field=field)
        if not ticket.version:
            raise InputError(f"adapter '{name}' is {ticket.state}: it can't be used yet", field=field)
        return ticket

    def _entry(self, ticket: Ticket, loaded: LoadedAdapter) -> AdapterEntry:
        return AdapterEntry(
            name=ticket.name,
            version=ticket.version,
            uid=loaded.uid,
            state=self._pool.state(loaded.uid) or "gone",
            path=ticket.path,
            kind="+".join(config.kind for config in loaded.configs),
            record=loaded.record,
            rank=max((config.max_rank for config in loaded.configs if isinstance(config, LoraConfig)), default=0),
            num_virtual=loaded.num_virtual,
            nbytes=loaded.nbytes,
            resident=self._pool.is_resident(loaded.uid),
            references=self._pool.num_references(loaded.uid),
        )
