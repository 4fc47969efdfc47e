"""An engine in a process of its own: a `ServedEngine` whose steps share no interpreter with the event loop.

    client ──generate──▶ this process ──messages──▶ engine's process: `engine_child`
       ▲                     │
       └── its stream ◀── a step's outputs, one message

In one process the event loop's time for a token and the engine's add up, because one thread at a time runs Python. In
two they overlap, and a loop that is behind finds a stream's tokens together.

What is asked without waiting is answered by a copy: tokenizer and vocabulary are loaded here too, adapters' names come
with each change, counts and residency up to 20 times a second, and at once when the engine has no work left.
"""

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peftkit.errors import InputError, RunError
from peftkit_serve.channel import Channel
from peftkit_serve.pages import text_room
from peftkit_serve.request import FinishReason, Request, RequestOutput, TokenLogprobs

if TYPE_CHECKING:
    from peftkit_serve.adapters.store import AdapterEntry
    from peftkit_serve.engine import EngineStats
    from peftkit_serve.engine_child import Made, MakeEngine, Row, State

logger = logging.getLogger(__name__)

_PROGRAM = """
import signal, sys
for ending in (signal.SIGINT, signal.SIGTERM):  # for the server, which drains first
    signal.signal(ending, signal.SIG_IGN)
from peftkit_serve.engine_child import main
main(int(sys.argv[1]))
"""
_STOP_S = 30.0
"""How long the engine's process may take to end: a step, and its last messages."""
_MOST_UNSENT = 2**28
"""Bytes that wait for a process that doesn't read, as one that is stopped, before requests are refused."""


@dataclass(slots=True, eq=False)
class _Stream:
    """What has come of one request, and who reads it. A slow reader finds one output with all that is new."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    delta: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    other: dict[str, Any] = field(default_factory=lambda: {"num_prompt_tokens": 0})
    """Fields of the next output."""
    is_new: bool = False
    failure: Exception | None = None
    """Why the request was not taken."""
    reader: asyncio.Future[None] | None = None

    def put(self, token_ids: Sequence[int], delta: str, more: dict[str, Any] | None) -> None:
        """Adds what is new."""
        self.token_ids += token_ids
        self.delta += delta
        if more is not None:
            self.logprobs += more.pop("logprobs", ())
            self.other |= more
        self.is_new = True
        self._wake()

    def end(self, reason: FinishReason, error: str | None) -> None:
        """Ends it without a word from the engine."""
        self.put((), "", {"finish_reason": reason, "error": error})

    def refuse(self, error: Exception) -> None:
        """Raises an error where the next output is waited for."""
        self.failure = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output."""
        if not self.is_new and self.failure is None:
            self.reader = self.loop.create_future()
            await self.reader
        if self.failure is not None:
            raise self.failure
        delta, self.delta, self.is_new = self.delta, "", False
        self.text += delta
        output = RequestOutput(
            self.request_id, self.text, delta, tuple(self.token_ids), logprobs=tuple(self.logprobs), **self.other
        )
        self.other.pop("started", None)
        return output

    def _wake(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)


class _Adapters:
    """A copy of what `AdapterStore` knows."""

    def __init__(self, entries: "Sequence[AdapterEntry]") -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.uses: dict[str, tuple[bool, int]] = {}

    def names(self) -> list[str]:
        return list(self.entries)

    def get(self, name: str) -> "AdapterEntry":
        entry = self._entry(name)
        resident, references = self.uses.get(entry.uid, (False, 0))
        return replace(entry, resident=resident, references=references)

    def uid(self, name: str) -> str:
        return self._entry(name).uid

    def _entry(self, name: str) -> "AdapterEntry":
        if name not in self.entries:
            raise InputError(f"there is no adapter named '{name[:140]}'", field="model")
        return self.entries[name]


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that are none of a process's first three descriptors, even where those are closed: the
    process that is started has others there."""
    import fcntl  # where there are such processes at all

    pair = socket.socketpair()
    if min(one.fileno() for one in pair) > 2:
        return pair
    first, second = (socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 3)) for one in pair)
    for one in pair:
        one.close()
    return first, second


class EngineProcess:
    """An `Engine` in a process of its own; a `ServedEngine` for the event loop that it is started on.

    That process begins anew, so it shares nothing with this one, which never touches the device. Signals are this
    one's: the other ignores SIGINT and SIGTERM, and ends as soon as this one is gone.
    """

    def __init__(self) -> None:
        """Starts the process, which imports what engines need meanwhile; `make` must follow, or `stop`."""
        ours, theirs = _pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._channel = Channel(ours)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = self._died = False
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def make(self, make: "MakeEngine") -> None:
        """Makes the engine and waits for it.

        make: called in the process, so it is a function of a module, or a `partial` of one with what can be pickled.

        Raises what `make` raises; RunError for what is none of our errors, and for a process that has ended.
        """
        from transformers import PreTrainedTokenizerFast

        from peftkit.base import load_tokenizer
        from peftkit_serve.vocabulary import Vocabulary

        self._channel.send(("make", make))
        made = self._first()
        self.base, self.spec, self._state = made.base, made.spec, made.state
        self.adapters = _Adapters(made.adapters)
        tokenizer = load_tokenizer(made.base)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer.backend_tokenizer)

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._open

    @property
    def died(self) -> bool:
        """Whether the engine, or its process, ended by a fault."""
        return self._died

    def start(self) -> None:
        """Takes requests on the running event loop, and on no other."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)
        self._open = True

    def stop(self) -> None:
        """Ends the engine and its process. Running requests are aborted: their streams end with "abort"."""
        self._open = False
        if self._loop is None:
            self._process.kill()
        else:
            self._channel.send(("stop",))
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._loop is None or self._loop.is_closed():
            self._channel.close()

    def room(self, num_virtual: int = 0) -> int:
        """Most tokens that a request's prompt and answer may have together, with an adapter of so many virtual ones."""
        return min(self.spec.max_position - num_virtual, text_room(self._state.stats["pages_total"], num_virtual))

    def stats(self) -> "EngineStats":
        """Counts that are at most a twentieth of a second old, or a step where that takes longer."""
        return self._state.stats

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """`ServedEngine.generate`."""
        loop = self._running()
        if self._channel.num_unsent > _MOST_UNSENT:
            raise RunError("the engine's process does not take requests now")
        number = next(self._numbers)
        stream = self._streams[number] = _Stream(request.request_id, loop)
        try:
            self._channel.send(("generate", number, request))
            while True:
                output = await stream.get()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(number, None) is not None:
                self._channel.send(("abandon", number))

    def abort(self, request_id: str) -> None:
        """`ServedEngine.abort`, at once: it is a way out where the engine's process answers no more."""
        for number, stream in list(self._streams.items()):
            if stream.request_id == request_id:
                del self._streams[number]
                self._channel.send(("abandon", number))
                stream.end("abort", None)

    async def add_adapter(self, name: str, path: str | Path) -> "AdapterEntry":
        """`ServedEngine.add_adapter`."""
        return await self._call("add_adapter", name, path)

    async def remove_adapter(self, name: str) -> "AdapterEntry":
        """`ServedEngine.remove_adapter`."""
        return await self._call("remove_adapter", name)

    async def check_schema(self, schema: str) -> None:
        """`ServedEngine.check_schema`."""
        await self._call("check_schema", schema)

    async def _call(self, method: str, *values: Any) -> Any:
        """Awaits a method of the engine thread."""
        future = self._running().create_future()
        number = next(self._numbers)
        self._calls[number] = future
        try:
            self._channel.send(("call", number, method, *values))
            return await future
        except asyncio.CancelledError:
            self._channel.send(("cancel", number))
            raise
        finally:
            self._calls.pop(number, None)

    def _running(self) -> asyncio.AbstractEventLoop:
        if not self._open or self._loop is None:
            raise RunError("the engine is not running")
        assert asyncio.get_running_loop() is self._loop, "asked on another event loop than it was started on"
        return self._loop

    def _first(self) -> "Made":
        """What the process says first; it says no more before this one has started."""
        try:
            while not (messages := self._channel.receive()):
                self._channel.wait()
        except EOFError:
            code = self._process.wait()
            raise RunError(f"the engine's process ended while the engine was made, with code {code}") from None
        (kind, answer), *later = messages
        if kind == "unmade":
            raise answer
        assert kind == "made" and not later
        return answer

    # From here on: what the engine's process says.

    def _read(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._lose()
            return
        for kind, *values in messages:
            getattr(self, f"_take_{kind}")(*values)

    def _take_outputs(self, rows: "Sequence[Row]", state: "State | None") -> None:
        if state is not None:
            self._state = state
            self.adapters.uses = state.uses
        for number, token_ids, delta, more in rows:
            stream = self._streams.get(number)
            if stream is None:  # abandoned
                continue
            if more is not None and "finish_reason" in more:
                del self._streams[number]
            stream.put(token_ids, delta, more)

    def _take_refused(self, number: int, error: Exception) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            stream.refuse(error)

    def _take_done(self, number: int, result: Any) -> None:
        if (future := self._calls.get(number)) is not None and not future.done():
            future.set_result(result)

    def _take_failed(self, number: int, error: Exception) -> None:
        if (future := self._calls.get(number)) is not None and not future.done():
            future.set_exception(error)

    def _take_added(self, entry: "AdapterEntry") -> None:
        self.adapters.entries[entry.name] = entry

    def _take_removed(self, name: str) -> None:
        del self.adapters.entries[name]

    def _take_ended(self, failure: str | None) -> None:
        """The engine has ended and has told all whom it had taken; others it will not take."""
        self._open, self._died = False, self._died or failure is not None
        error = RunError(failure or "the engine was stopped")
        for number in list(self._streams):
            self._take_refused(number, error)
        for number in list(self._calls):
            self._take_failed(number, error)

    def _lose(self) -> None:
        """The process is gone. Unless it said so before, requests and calls end here."""
        assert self._loop is not None
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        failure = "the engine died: its process is gone"
        for stream in self._streams.values():
            stream.end("error", failure)
        self._streams.clear()
        if self._open:
            self._loop.run_in_executor(None, self._log_end)
        self._take_ended(failure if self._open else None)

    def _log_end(self) -> None:
        logger.error("the engine's process %d ended with code %d", self.pid, self._process.wait())
