"""The process that an engine has to itself, which `EngineProcess` starts.

    server ◀──messages──▶ main thread: an event loop ──commands──▶ engine thread
       ▲                                                               │
       └──────────── a step's outputs, as one message ◀────────────────┘

A message is a tuple that begins with its kind. What comes in names a method of `_Child`; what goes out one of
`EngineProcess`. The process ends with the server, by whatever that ends: its socket is closed then.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from peftkit.base import BaseInfo
from peftkit.errors import PeftkitError, RunError
from peftkit_serve.adapters.store import AdapterEntry, Ticket
from peftkit_serve.channel import Channel
from peftkit_serve.engine import Engine, EngineStats
from peftkit_serve.engine_thread import EngineThread
from peftkit_serve.models.spec import ModelSpec
from peftkit_serve.request import Request, RequestOutput

logger = logging.getLogger(__name__)

STATE_S = 0.05
"""A busy engine tells its state no more often. One that has no work left tells it at once."""
_LAST_WORDS_S = 5.0
"""How long a server that reads nothing is waited for at the end."""

MakeEngine = Callable[[], Engine]
Row = tuple[int, tuple[int, ...], str, dict[str, Any] | None]
"""What is new of a request, by its number: token ids, text, and fields of `RequestOutput` that most outputs don't set;
their log-probabilities are those of the new tokens."""


@dataclass(frozen=True, slots=True)
class State:
    """What the server is asked of the engine at any moment."""

    stats: EngineStats
    uses: dict[str, tuple[bool, int]]
    """`Engine.adapter_uses`."""


@dataclass(frozen=True, slots=True)
class Made:
    """An engine that is there."""

    base: BaseInfo
    spec: ModelSpec
    adapters: list[AdapterEntry]
    state: State


@dataclass(slots=True, eq=False)
class _Told:
    """How much of a request's output has been sent."""

    number: int
    num_tokens: int = 0
    num_prompt_logprobs: int = 0

    def row(self, output: RequestOutput) -> Row:
        """What is new."""
        before, self.num_tokens = self.num_tokens, len(output.token_ids)
        more: dict[str, Any] = {}
        if not before:
            more["num_prompt_tokens"] = output.num_prompt_tokens
        if output.started is not None:
            more["started"] = output.started
        if output.finish_reason is not None:
            more["finish_reason"], more["error"] = output.finish_reason, output.error
        if len(output.logprobs) > before:
            more["logprobs"] = output.logprobs[before:]
        if len(output.prompt_logprobs) > self.num_prompt_logprobs:
            self.num_prompt_logprobs = len(output.prompt_logprobs)
            more["prompt_logprobs"] = output.prompt_logprobs
        return self.number, output.token_ids[before:], output.delta, more or None


class _Relay(EngineThread[_Told]):
    """The engine thread, whose outputs go to another process."""

    def __init__(self, engine: Engine, channel: Channel, ended: Callable[[], object]) -> None:
        """ended: called on the engine thread when that has said everything."""
        super().__init__(engine)
        self._channel = channel
        self._tell_end = ended
        self._requests_by_number: dict[int, tuple[str, _Told]] = {}
        self._state = self._look()
        self._due = 0.0

    def generate(self, number: int, request: Request) -> None:
        """Queues a request that the server has given a number."""
        told = _Told(number)

        def begin() -> None:
            try:
                self._begin(request, told)
            except Exception as error:  # its asker's
                self._channel.send(("refused", number, sendable(error)))
            else:
                self._requests_by_number[number] = request.request_id, told

        self._post(begin)

    def abandon(self, number: int) -> None:
        """Nobody waits for this request any more."""

        def abandon() -> None:
            if (found := self._requests_by_number.pop(number, None)) is not None:
                self._abandon(*found)

        self._post(abandon)

    async def settle(self) -> None:
        """Returns when the server knows the engine's present state."""
        await self._call(self._rest)

    def made(self) -> Made:
        """What the server keeps of the engine. Before the start."""
        adapters = self.engine.adapters
        return Made(self.engine.base, self.engine.spec, [adapters.get(name) for name in adapters.names()], self._state)

    def _register(self, ticket: Ticket) -> AdapterEntry:
        entry = super()._register(ticket)
        self._channel.send(("added", entry))
        return entry

    def _unregister(self, name: str) -> AdapterEntry:
        entry = super()._unregister(name)
        self._channel.send(("removed", name))
        return entry

    def _deliver(self, outputs: Sequence[tuple[_Told, RequestOutput]]) -> None:
        rows: list[Row] = []
        for told, output in outputs:
            rows.append(told.row(output))
            if output.finish_reason is not None:
                self._requests_by_number.pop(told.number, None)
        now = time.monotonic()
        state = None
        if now >= self._due or not self.engine.has_work():
            self._due = now + STATE_S
            state = self._changed_state()
        if rows or state is not None:
            self._channel.send(("outputs", rows, state))

    def _rest(self) -> None:
        if (state := self._changed_state()) is not None:
            self._channel.send(("outputs", (), state))

    def _ended(self, failure: str | None) -> None:
        self._channel.send(("ended", failure))
        self._tell_end()

    def _changed_state(self) -> State | None:
        before, self._state = self._state, self._look()
        return None if self._state == before else self._state

    def _look(self) -> State:
        return State(self.engine.stats(), self.engine.adapter_uses())


class _Child:
    """Does what the server asks, on the main thread's event loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._relay: _Relay | None = None
        self.ended = self._loop.create_future()
        self._loop.add_reader(channel.fileno(), self._read)

    def make(self, make: MakeEngine) -> None:
        """Makes the engine, beside this thread, which sees meanwhile whether the server is still there."""
        self._begin(0, self._make(make))

    def generate(self, number: int, request: Request) -> None:
        """`_Relay.generate`."""
        self._there.generate(number, request)

    def abandon(self, number: int) -> None:
        """`_Relay.abandon`."""
        self._there.abandon(number)

    def call(self, number: int, method: str, *values: Any) -> None:
        """Awaits a method of the engine thread and answers with its result, or its error."""
        self._begin(number, self._answer(number, getattr(self._there, method)(*values)))

    def cancel(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def stop(self) -> None:
        """`EngineThread.stop`; the process ends after it."""
        self._begin(-1, asyncio.to_thread(self._there.stop))

    @property
    def _there(self) -> _Relay:
        assert self._relay is not None
        return self._relay

    async def _make(self, make: MakeEngine) -> None:
        def made() -> _Relay:
            relay = _Relay(make(), self._channel, lambda: self._loop.call_soon_threadsafe(self._end))
            gc.collect()
            gc.freeze()  # a full collection in the middle of a step would walk through all this, to free none of it
            return relay

        try:
            self._relay = await asyncio.to_thread(made)
            self._channel.send(("made", self._relay.made()))
        except BaseException as error:  # a panic of a Rust library is no Exception
            logger.debug("the engine could not be made", exc_info=True)
            self._channel.send(("unmade", error if isinstance(error, PeftkitError) else RunError(_line(error))))
            self._end()
        else:
            self._relay.start()

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        answer: tuple[str, int, Any]
        try:
            answer = "done", number, await work
        except Exception as error:  # its asker's
            answer = "failed", number, sendable(error)
        with suppress(RunError):  # unless the engine has ended
            await self._there.settle()  # what has changed is known before the answer
        self._channel.send(answer)

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[number] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number))

    def _read(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            os._exit(1)  # the server is gone, and nothing of this lasts
        except Exception as error:  # a function that is not here, as one of the server's `__main__`
            if self._relay is not None:
                raise
            self._channel.send(("unmade", RunError(_line(error))))
            self._end()
            return
        for kind, *values in messages:
            getattr(self, kind)(*values)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def sendable(error: Exception) -> Exception:
    """An error as another process can raise it: any but ours is told by its kind alone, and logged here."""
    if isinstance(error, PeftkitError):
        return error
    logger.error("a command failed in the engine's process", exc_info=error)
    return RuntimeError(f"{type(error).__name__} in the engine's process, whose log line says where")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


async def _serve(channel: Channel) -> None:
    child = _Child(channel)
    await child.ended
    await asyncio.to_thread(channel.flush, _LAST_WORDS_S)
    os._exit(0)  # the device's memory is free at once; there is nothing to put in order


def main(descriptor: int) -> None:
    """Serves one server to its end, over a socket."""
    with socket.socket(fileno=descriptor) as connection:
        asyncio.run(_serve(Channel(connection)))
