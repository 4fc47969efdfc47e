"""An engine for many asyncio clients: one thread drives it, and each client reads a stream of its own.

    client ──generate──▶ command queue ──▶ engine thread: all commands, then one step, and again
       ▲                                        │
       └────────── the client's stream ◀────────┘   (call_soon_threadsafe into the client's loop)

Only the engine thread touches the engine. What a client asks for is a command that runs there between two steps;
reading an adapter's folder happens before, on the loader's thread.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from peftkit.errors import RunError
from peftkit_serve.adapters.store import AdapterEntry
from peftkit_serve.engine import Engine, EngineStats
from peftkit_serve.request import Request, RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
class _Stream:
    """Where the engine thread puts one request's outputs."""

    loop: asyncio.AbstractEventLoop
    last: RequestOutput
    pending: RequestOutput | None = None
    """What its reader has not taken. A reader that is slow finds one output with all that is new, not a row of them."""
    reader: asyncio.Future[None] | None = None
    """Who waits for the next one."""
    started: float | None = None
    """When the first step with it began."""

    def put(self, output: RequestOutput) -> None:
        """On the reader's loop."""
        if self.pending is not None:
            output = replace(output, delta=self.pending.delta + output.delta)
        self.pending = output
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    async def get(self) -> RequestOutput:
        """The next output."""
        if self.pending is None:
            self.reader = self.loop.create_future()
            await self.reader
        output, self.pending = self.pending, None
        assert output is not None
        return output


class AsyncEngine:
    """Drives an `Engine` on a thread of its own. The engine must not be used directly while this runs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        """For what any thread may ask: `base`, `spec`, `tokenizer`, `room`, `stats`, `adapters.names`, `get`, `uid`."""
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._unstarted: dict[str, _Stream] = {}
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
        """Ends the engine thread. Running requests are aborted: their streams end with "abort"."""
        with self._lock:
            if self._open:
                self._open = False
                self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request and yields its outputs, the last one with a finish_reason.

        Closing or cancelling the iteration aborts the request. Raises what `Engine.add_request` raises, and RunError
        when the engine is not running.
        """
        nothing = RequestOutput(request.request_id, "", "", (), 0)
        stream = _Stream(asyncio.get_running_loop(), nothing)
        ended = False
        try:
            await self._call(lambda: self._begin(request, stream))
            output = replace(await stream.get(), started=stream.started)
            while not (ended := output.finish_reason is not None):
                yield output
                output = await stream.get()
            yield output
        finally:
            if not ended:
                self._post(_Command(lambda: self._abandon(request.request_id, stream), Future()))

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps: the last output of its stream has the finish_reason "abort"."""

        def abort() -> None:
            if output := self.engine.abort(request_id):
                self._deliver([output])

        self._post(_Command(abort, Future()))

    async def add_adapter(self, name: str, path: str | Path) -> AdapterEntry:
        """`engine.adapters.add`; its folder is read while the engine goes on stepping."""
        ticket = self.engine.adapters.begin(name, path)
        try:
            await asyncio.wrap_future(ticket.future)
            return await self._call(lambda: self.engine.adapters.register(ticket))
        except BaseException:
            self.engine.adapters.cancel(ticket)
            raise

    async def remove_adapter(self, name: str) -> AdapterEntry:
        """`engine.adapters.remove`; returns when its last request has ended and its memory is free."""
        drained: Future[None] = Future()

        def remove() -> AdapterEntry:
            entry = self.engine.adapters.remove(name)
            self._drains.append((entry.uid, drained))
            return entry

        entry = await self._call(remove)
        await asyncio.wrap_future(drained)
        return replace(entry, state="gone", resident=False, references=0)

    def stats(self) -> EngineStats:
        """`engine.stats`."""
        return self.engine.stats()

    async def _call(self, action: Callable[[], T]) -> T:
        """Runs an action on the engine thread and returns its result. Cancelled before it begins, it doesn't run."""
        future: Future[T] = Future()
        if not self._post(_Command(action, future)):
            raise RunError("the engine is not running")
        return await asyncio.wrap_future(future)

    def _post(self, command: _Command) -> bool:
        with self._lock:
            if self._open:
                self._commands.put(command)
            return self._open

    # From here on: the engine thread.

    def _run(self) -> None:
        failure: str | None = None
        outputs: list[RequestOutput] = []
        try:
            self._drive()
            outputs = [output for request_id in self._streams if (output := self.engine.abort(request_id))]
        except BaseException as error:  # a panic of a Rust library is no Exception
            logger.exception("the engine thread died")
            self._died = True
            failure = f"the engine died: {type(error).__name__}"
            lost = [stream.last for stream in self._streams.values()]
            outputs = [replace(last, delta="", finish_reason="error", error=failure) for last in lost]
        with self._lock:
            self._open = False
        self._deliver(outputs)
        self._settle_drains()
        self._refuse_all(RunError(failure or "the engine was stopped"))

    def _drive(self) -> None:
        """Commands and steps in turn, until told to stop."""
        while self._obey():
            begin = time.monotonic()
            outputs = self.engine.step()
            self._note_starts(begin)
            self._deliver(outputs)
            self._settle_drains()

    def _obey(self) -> bool:
        """Runs all commands there are, and waits for them while there is no work; False when told to stop."""
        checked = False
        while True:
            busy = self.engine.has_work()
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

    def _begin(self, request: Request, stream: _Stream) -> None:
        self.engine.add_request(request)
        self._streams[request.request_id] = self._unstarted[request.request_id] = stream

    def _abandon(self, request_id: str, stream: _Stream) -> None:
        """The client is gone. Another request may have this id by now: it is told apart by its stream."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._unstarted.pop(request_id, None)
            self.engine.abort(request_id)

    def _note_starts(self, begin: float) -> None:
        """Books the step that began at `begin` as the first one of all that waited and don't any more."""
        if self._unstarted:
            for request_id in self._unstarted.keys() - self.engine.waiting():
                self._unstarted.pop(request_id).started = begin

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Hands each output to its stream, waking each loop once."""
        batches: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams[output.request_id]
            stream.last = output
            batches[stream.loop].append((stream, output))
            if output.finish_reason is not None:
                del self._streams[output.request_id]
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed, its clients are gone
                for stream, output in batch:
                    self._abandon(output.request_id, stream)

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


def _put_all(batch: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)
