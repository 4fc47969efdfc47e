"""Work for one client, raced against its going away: a client that is gone is not worked for."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
"""The last event of every stream."""
CLIENT_GONE = 499
"""Status of an answer that nobody reads: seen in logs and metrics only."""


def event(data: str) -> str:
    """One server-sent event; `data` is JSON on one line."""
    return f"data: {data}\n\n"


async def while_connected(work: Coroutine[None, None, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away; `ClientDisconnect` is raised then.

    `receive` must have delivered the request's body already."""

    async def until_disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(until_disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's index. The first failure ends all streams.

    A stream is asked for its next item when the one before has been taken: what a slow reader leaves stays there."""
    if len(streams) == 1:  # most requests: no task and no queue between the engine and the client
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    # room for one: each other stream waits with its next item in hand, in turn
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, raced against the client's going away.

    Nothing is sent before the first event is there, so that what fails before it is still an ordinary error answer.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                await while_connected(self._send_all(events, send), receive)
            except ClientDisconnect:
                pass  # the generator's own end has already freed the request

    async def _send_all(self, events: AsyncGenerator[str, None], send: Send) -> None:
        started = False
        async for text in events:
            if not started:
                started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await asyncio.sleep(0)  # neither events nor sending need suspend: others, and the watching, have their turn
        await send({"type": "http.response.body", "body": b"", "more_body": False})
