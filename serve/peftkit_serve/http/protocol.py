"""uvicorn's HTTP with bounds on what comes before a body: httptools by itself takes headers without end, for ever."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers, beyond the block in which they begin (256 KiB at most)."""
HEAD_TIMEOUT_S = 65.0
"""From a connection's or a request's beginning to the end of its headers."""


class BoundedHttp(HttpToolsProtocol):
    """One client's connection; one whose head is too long or too late is closed."""

    _in_head = False
    _num_bytes = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_before = self._in_head
        super().data_received(data)
        if began_before and self._in_head:
            self._num_bytes += len(data)
            if self._num_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The request's headers have more than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_bytes = True, 0
        self._wait()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
