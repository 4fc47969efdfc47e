"""The thread that drives an engine: commands, then one step, and again.

    who asks ──post──▶ command queue ──▶ engine thread: all commands, then one step ──deliver──▶ whose request it is

Only this thread touches the engine. What is asked for is a command that runs there between two steps; reading an
adapter's folder happens before, on the loader's thread. Where outputs go is for a child class to say: `AsyncEngine`
puts them into streams of this process, `engine_child` sends them to another one.
"""

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio.to_thread

from peftkit.errors import RunError
from peftkit_serve.adapters.store import AdapterEntry, Ticket
from peftkit_serve.engine import Engine, EngineStats
from peftkit_serve.request import Request, RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
Reader = TypeVar("Reader")
"""Whom a request's outputs are for."""

_IDLE_S = 1.0
"""After this long without work the engine checks its own integrity, once."""


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do on the engine thread, and where its result goes."""

    action: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.action())
        except Exception as error:  # the command's fault is its caller's to see; the engine goes on
            self.future.set_exception(error)
        except BaseException as error:  # the engine dies of it, as `_run` says
            self.future.set_exception(RunError(f"the engine died: {type(error).__name__}"))
            raise

    def refuse(self, error: RunError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Taken(Generic[Reader]):
    """A request that the engine has taken and that has not ended."""

    reader: Reader
    last: RequestOutput
    started: float | None = None
    """When the first step with it began, until an output has told it."""


class EngineThread(ABC, Generic[Reader]):
    """Drives an `Engine` on a thread of its own. The engine must not be used directly while this runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._requests: dict[str, _Taken[Reader]] = {}
        self._unstarted: dict[str, _Taken[Reader]] = {}
        self._drains: list[tuple[str, Future[None]]] = []
        self._lock = threading.Lock()  # no command is posted once the thread has begun to end
        self._open = self._died = False
        self._thread = threading.Thread(target=self._run, name="peftkit-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the engine thread takes requests."""
        return self._open

    @property
    def died(self) -> bool:
        """Whether the engine thread ended by a fault. It doesn't come back: the process must be started anew."""
        return self._died

    def start(self) -> None:
        """Starts the engine thread; once in its life."""
        self._open = True
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine thread. Running requests are aborted: their last outputs say "abort"."""
        with self._lock:
            if self._open:
                self._open = False
                self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps: its last output has the finish_reason "abort"."""

        def abort() -> None:
            if output := self.engine.abort(request_id):
                self._hand_out([output])

        self._post(abort)

    async def add_adapter(self, name: str, path: str | Path) -> AdapterEntry:
        """`engine.adapters.add`; its folder is read while the engine goes on stepping."""
        ticket = self.engine.adapters.begin(name, path)
        try:
            await asyncio.wrap_future(ticket.future)
            return await self._call(lambda: self._register(ticket))
        except BaseException:
            self.engine.adapters.cancel(ticket)
            raise

    async def remove_adapter(self, name: str) -> AdapterEntry:
        """`engine.adapters.remove`; returns when its last request has ended and its memory is free."""
        drained: Future[None] = Future()

        def remove() -> AdapterEntry:
            entry = self._unregister(name)
            self._drains.append((entry.uid, drained))
            return entry

        entry = await self._call(remove)
        await asyncio.wrap_future(drained)
        return replace(entry, state="gone", resident=False, references=0)

    async def check_schema(self, schema: str) -> None:
        """Whether answers can be held to a JSON schema. Raises InputError (field "json_schema") for one that can't."""
        await anyio.to_thread.run_sync(self.engine.grammars.json, schema)  # kept for the request that follows

    def stats(self) -> EngineStats:
        """`engine.stats`."""
        return self.engine.stats()

    async def _call(self, action: Callable[[], T]) -> T:
        """Runs an action on the engine thread and returns its result. Cancelled before it begins, it doesn't run."""
        future = self._post(action)
        if future is None:
            raise RunError("the engine is not running")
        return await asyncio.wrap_future(future)

    def _post(self, action: Callable[[], T]) -> Future[T] | None:
        """Leaves an action to the engine thread; None when that takes none any more."""
        future: Future[T] = Future()
        with self._lock:
            if not self._open:
                return None
            self._commands.put(_Command(action, future))
        return future

    # From here on: the engine thread.

    @abstractmethod
    def _deliver(self, outputs: Sequence[tuple[Reader, RequestOutput]]) -> None:
        """Takes outputs to those whose requests they are of; called once a step."""

    def _register(self, ticket: Ticket) -> AdapterEntry:
        return self.engine.adapters.register(ticket)

    def _unregister(self, name: str) -> AdapterEntry:
        return self.engine.adapters.remove(name)

    def _rest(self) -> None:
        """Called when there is no work left, before the thread waits for commands."""

    def _ended(self, failure: str | None) -> None:
        """Called when the thread is done with all. failure: what it died of."""

    def _run(self) -> None:
        failure: str | None = None
        outputs: list[RequestOutput] = []
        try:
            self._drive()
            outputs = [output for request_id in self._requests if (output := self.engine.abort(request_id))]
        except BaseException as error:  # a panic of a Rust library is no Exception
            logger.exception("the engine thread died")
            self._died = True
            failure = f"the engine died: {type(error).__name__}"
            lost = [taken.last for taken in self._requests.values()]
            outputs = [replace(last, delta="", finish_reason="error", error=failure) for last in lost]
        with self._lock:
            self._open = False
        self._hand_out(outputs)
        self._settle_drains()
        self._refuse_all(RunError(failure or "the engine was stopped"))
        self._ended(failure)

    def _drive(self) -> None:
        """Commands and steps in turn, until told to stop."""
        while self._obey():
            begin = time.monotonic()
            outputs = self.engine.step()
            self._note_starts(begin)
            self._hand_out(outputs)
            self._settle_drains()

    def _obey(self) -> bool:
        """Runs all commands there are, and waits for them while there is no work; False when told to stop."""
        checked = False
        while True:
            busy = self.engine.has_work()
            if not busy:
                self._rest()
            try:
                command = self._commands.get(block=not busy, timeout=None if checked else _IDLE_S)
            except queue.Empty:
                if busy:
                    return True
                self.engine.check_integrity()
                checked = True
                continue
            if command is None:
                return False
            command.run()
            self._settle_drains()

    def _begin(self, request: Request, reader: Reader) -> None:
        self.engine.add_request(request)
        nothing = RequestOutput(request.request_id, "", "", (), 0)
        self._requests[request.request_id] = self._unstarted[request.request_id] = _Taken(reader, nothing)

    def _abandon(self, request_id: str, reader: Reader) -> None:
        """The client is gone. Another request may have this id by now: it is told apart by its reader."""
        taken = self._requests.get(request_id)
        if taken is not None and taken.reader is reader:
            del self._requests[request_id]
            self._unstarted.pop(request_id, None)
            self.engine.abort(request_id)

    def _note_starts(self, begin: float) -> None:
        """Books the step that began at `begin` as the first one of all that waited and don't any more."""
        if self._unstarted:
            for request_id in self._unstarted.keys() - self.engine.waiting():
                self._unstarted.pop(request_id).started = begin

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        batch: list[tuple[Reader, RequestOutput]] = []
        for output in outputs:
            taken = self._requests[output.request_id]
            taken.last = output
            if taken.started is not None:
                output, taken.started = replace(output, started=taken.started), None
            batch.append((taken.reader, output))
            if output.finish_reason is not None:
                del self._requests[output.request_id]
        self._deliver(batch)

    def _settle_drains(self) -> None:
        waiting = self._drains
        self._drains = [(uid, drained) for uid, drained in waiting if self.engine.adapters.is_draining(uid)]
        for uid, drained in waiting:
            if not self.engine.adapters.is_draining(uid) and drained.set_running_or_notify_cancel():
                drained.set_result(None)

    def _refuse_all(self, error: RunError) -> None:
        for _, drained in self._drains:
            if drained.set_running_or_notify_cancel():
                drained.set_exception(error)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(error)
