"""An engine for many asyncio clients of one process: a thread drives it, and each client reads a stream of its own.

    client ──generate──▶ engine thread (`EngineThread`)
       ▲                      │
       └── the client's stream ◀── call_soon_threadsafe into the client's loop

`ServedEngine` is what the HTTP service needs of an engine; `EngineProcess` is the other one that there is.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from peftkit.base import BaseInfo
from peftkit_serve.adapters.store import AdapterEntry
from peftkit_serve.engine import EngineStats
from peftkit_serve.engine_thread import EngineThread
from peftkit_serve.request import Request, RequestOutput
from peftkit_serve.vocabulary import Vocabulary


class AdapterNames(Protocol):
    """What is known of an engine's adapters; see `AdapterStore`."""

    def names(self) -> list[str]:
        """Names that requests can give, in the order in which they were registered."""
        ...

    def get(self, name: str) -> AdapterEntry:
        """What is known of a name. Raises InputError (field "model") for an unknown one."""
        ...

    def uid(self, name: str) -> str:
        """The content that a name points to now. Raises InputError (field "model") for an unknown one."""
        ...


class ServedEngine(Protocol):
    """What the HTTP service needs of an engine, wherever that runs. What isn't awaited answers at once."""

    @property
    def base(self) -> BaseInfo: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def adapters(self) -> AdapterNames: ...
    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        ...

    @property
    def died(self) -> bool:
        """Whether the engine ended by a fault. It doesn't come back: the process must be started anew."""
        ...

    def start(self) -> None:
        """Starts to take requests, on the running event loop; once in its life."""
        ...

    def stop(self) -> None:
        """Ends the engine and waits for that. Running requests are aborted: their streams end with "abort"."""
        ...

    def room(self, num_virtual: int = 0) -> int:
        """Most tokens that a request's prompt and answer may have together, with an adapter of so many virtual ones."""
        ...

    def stats(self) -> EngineStats:
        """Counts for people and metrics."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request and yields its outputs, the last one with a finish_reason.

        Closing or cancelling the iteration aborts the request. Raises what `Engine.add_request` raises, and RunError
        when the engine is not running.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request between two steps: the last output of its stream has the finish_reason "abort"."""
        ...

    async def add_adapter(self, name: str, path: str | Path) -> AdapterEntry:
        """`AdapterStore.add`; the engine goes on stepping meanwhile."""
        ...

    async def remove_adapter(self, name: str) -> AdapterEntry:
        """`AdapterStore.remove`; returns when its last request has ended and its memory is free."""
        ...

    async def check_schema(self, schema: str) -> None:
        """Whether answers can be held to a JSON schema. Raises InputError (field "json_schema") for one that can't."""
        ...


@dataclass(slots=True, eq=False)
class _Stream:
    """Where one request's outputs wait for its reader."""

    loop: asyncio.AbstractEventLoop
    pending: RequestOutput | None = None
    """What its reader has not taken. A reader that is slow finds one output with all that is new, not a row of them."""
    reader: asyncio.Future[None] | None = None
    """Who waits for the next one."""

    def put(self, output: RequestOutput) -> None:
        """On the reader's loop."""
        if self.pending is not None:
            output = replace(output, delta=self.pending.delta + output.delta, started=self.pending.started)
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


class AsyncEngine(EngineThread[_Stream]):
    """An `Engine` in this process, driven by a thread; a `ServedEngine` for any number of event loops."""

    @property
    def base(self) -> BaseInfo:
        """The engine's."""
        return self.engine.base

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base's."""
        return self.engine.tokenizer

    @property
    def vocabulary(self) -> Vocabulary:
        """Its single tokens."""
        return self.engine.vocabulary

    @property
    def adapters(self) -> AdapterNames:
        """What is known of the engine's adapters."""
        return self.engine.adapters

    def room(self, num_virtual: int = 0) -> int:
        """`engine.room_behind`."""
        return self.engine.room_behind(num_virtual)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """`ServedEngine.generate`."""
        stream = _Stream(asyncio.get_running_loop())
        ended = False
        try:
            await self._call(lambda: self._begin(request, stream))
            while not ended:
                output = await stream.get()
                ended = output.finish_reason is not None
                yield output
        finally:
            if not ended:
                self._post(lambda: self._abandon(request.request_id, stream))

    def _deliver(self, outputs: Sequence[tuple[_Stream, RequestOutput]]) -> None:
        """Hands each output to its stream, waking each loop once."""
        batches: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(list)
        for stream, output in outputs:
            batches[stream.loop].append((stream, output))
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed, its clients are gone
                for stream, output in batch:
                    self._abandon(output.request_id, stream)


def _put_all(batch: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in batch:
        stream.put(output)
