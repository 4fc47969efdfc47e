"""The clients of `peftkit bench serve --http`: a process of its own, so light that it is never what is measured.

    python -m peftkit_bench.serve_http_client < plan.json > times.json

Nothing but the standard library: bodies are made before the first is sent, and of an answer's bytes only the marks
of events are looked for as they come. Times are `time.perf_counter()`, which all processes of a machine share.
"""

import asyncio
import gc
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_EVENT = b"\ndata: {"  # a raw line end is never part of JSON
_DONE = b"\ndata: [DONE]"
_END = b"\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_COUNTED = re.compile(rb'"completion_tokens":(\d+)')
_KEPT = 1024
"""Bytes of a stream's end that are kept: the chunk with the token counts is shorter."""


@dataclass(slots=True)
class Times:
    """One request: when it was sent, its status, when each of its events came, and how many tokens the server counted.

    The event with the counts is not among `events`. An answer that broke off has status 0, or its error in `fault`.
    """

    index: int
    sent: float
    status: int = 0
    events: list[float] = field(default_factory=list[float])
    tokens: int = 0
    fault: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._times: Times | None = None
        self._over: asyncio.Future[None] | None = None
        self._kept = b""
        self.open = False

    async def ask(self, request: bytes, times: Times) -> None:
        """Sends a request and returns when its answer is complete, or has broken off."""
        assert self._transport is not None
        self._times, self._kept = times, b""
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._over

    def close(self) -> None:
        """Goes away, in the middle of an answer too."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._finish("the connection was closed")

    def data_received(self, data: bytes) -> None:
        times = self._times
        if times is None:
            return
        now = time.perf_counter()
        if not times.status:
            self._kept += data
            if b"\r\n\r\n" not in self._kept:
                return
            times.status, data, self._kept = int(self._kept[9:12]), self._kept, b""
        if times.status != 200:
            self._refused(data)
            return
        # a mark may lie across two reads, but never whole in what is kept of the last one
        joined = self._kept[1 - len(_EVENT) :] + data
        times.events += [now] * joined.count(_EVENT)
        self._kept = (self._kept + data)[-_KEPT:]
        if self._kept.endswith(_END) and _DONE in self._kept:
            counted = _COUNTED.search(self._kept)
            if counted is None:
                self._finish(self._kept.decode(errors="replace")[-300:])
            else:
                times.tokens = int(counted[1])
                times.events.pop()
                self._finish("")

    def _refused(self, data: bytes) -> None:
        self._kept += data
        head, _, body = self._kept.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is not None and len(body) >= int(length[1]):
            self._finish(body.decode(errors="replace")[:300])

    def _finish(self, fault: str) -> None:
        if self._times is not None and self._over is not None:
            self._times.fault = fault
            self._times = None
            if not self._over.done():
                self._over.set_result(None)


@dataclass(frozen=True, slots=True)
class _Order:
    """A request of the plan."""

    index: int
    at: float
    """Seconds after the beginning; in a plan of streams none is waited for."""
    body: bytes


class Clients:
    """All connections of this process."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self.times: list[Times] = []

    async def connect(self, count: int) -> None:
        """Opens connections ahead."""
        self._idle += await asyncio.gather(*(self._new() for _ in range(count)))

    async def streams(self, orders: Sequence[_Order], count: int) -> None:
        """So many streams at a time: each sends its next request when its last answer is complete."""
        following = iter(orders)
        await asyncio.gather(*(self._stream(following) for _ in range(count)))

    async def arrivals(self, orders: Sequence[_Order], until: float) -> None:
        """Each request at its own time, whatever has become of the others; at `until` all that runs is cut off."""
        begun, running = time.perf_counter(), list[asyncio.Task[None]]()
        for order in orders:
            wait = begun + order.at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            running.append(asyncio.create_task(self._send(order)))
        await asyncio.sleep(max(0.0, begun + until - time.perf_counter()))
        self.close()
        await asyncio.gather(*running)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._all:
            connection.close()

    async def _stream(self, orders: Iterator[_Order]) -> None:
        for order in orders:
            await self._send(order)

    async def _send(self, order: _Order) -> None:
        while self._idle and not self._idle[-1].open:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._new()
        times = Times(order.index, time.perf_counter())
        self.times.append(times)
        await connection.ask(order.body, times)
        self._idle.append(connection)

    async def _new(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port)
        self._all.append(connection)
        return connection


def _orders(plan: dict[str, Any]) -> list[_Order]:
    """The plan's requests as bytes."""
    orders: list[_Order] = []
    for request in plan["requests"]:
        body = {
            "model": plan["model"], "prompt": request["prompt"], "max_tokens": request["max_tokens"],
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        text = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {plan['host']}:{plan['port']}\r\n"
            f"authorization: Bearer {request['key']}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(text)}\r\n\r\n"
        )
        orders.append(_Order(request["index"], request.get("at", 0.0), head.encode() + text))
    return orders


async def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Does what a plan says, from its `start` (of `time.perf_counter()`) on."""
    orders, clients = _orders(plan), Clients(plan["host"], plan["port"])
    await clients.connect(plan.get("streams", 0))
    gc.freeze()
    gc.disable()
    await asyncio.sleep(max(0.0, plan["start"] - time.perf_counter()))
    begun, begun_cpu = time.perf_counter(), time.process_time()
    if "streams" in plan:
        await clients.streams(orders, plan["streams"])
    else:
        await clients.arrivals(orders, plan["until"])
    ended, cpu = time.perf_counter(), time.process_time() - begun_cpu
    clients.close()
    return {
        "begun": begun,
        "ended": ended,
        "cpu_share": cpu / (ended - begun),
        "times": [one.plain() for one in clients.times],
    }


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
