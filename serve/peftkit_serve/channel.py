"""Messages between two processes that trust each other: pickles over a socket, in order, and no side waits."""

import pickle
import select
import socket
import threading
from collections import deque
from typing import Any

_CHUNK = 2**18
_HEAD = 8
"""Bytes of a message's length."""


class Channel:
    """One end. Any thread may send, one receives.

    What the kernel has no room for is kept, and written by a thread of its own: neither an event loop nor a step is
    held up by a process that doesn't come to read.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._chunk = bytearray(_CHUNK)
        self._received = bytearray()
        self._changed = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._num_unsent = 0
        self._writer: threading.Thread | None = None

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes that the kernel has no room for yet."""
        return self._num_unsent

    def send(self, message: Any) -> None:
        """Sends a message, now or as soon as there is room. One that nobody will read is dropped."""
        body = pickle.dumps(message, protocol=5)
        rest = memoryview(len(body).to_bytes(_HEAD, "little") + body)
        with self._changed:
            if not self._backlog:
                rest = rest[self._write(rest) :]
            if rest:
                self._backlog.append(rest)
                self._num_unsent += len(rest)
                self._changed.notify_all()
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write_backlog, name="peftkit-channel", daemon=True)
                    self._writer.start()

    def receive(self) -> list[Any]:
        """The messages that are here. Raises EOFError when the other side is gone and all that it sent was taken."""
        try:
            size = self._socket.recv_into(self._chunk)
        except BlockingIOError:
            return []
        except ConnectionError:
            size = 0
        if not size:
            raise EOFError
        self._received += memoryview(self._chunk)[:size]
        messages: list[Any] = []
        begin = 0
        with memoryview(self._received) as view:
            while len(view) - begin >= _HEAD:
                end = begin + _HEAD + int.from_bytes(view[begin : begin + _HEAD], "little")
                if end > len(view):
                    break
                messages.append(pickle.loads(view[begin + _HEAD : end]))
                begin = end
        del self._received[:begin]
        return messages

    def wait(self) -> None:
        """Until there is something to receive."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def flush(self, timeout_s: float) -> None:
        """Until all that was sent is in the kernel's hands, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog, timeout_s)

    def close(self) -> None:
        """Nothing is sent or received any more."""
        self._socket.close()

    def _write(self, data: memoryview) -> int:
        """Bytes that the kernel has taken; all of them when nobody is there to read them."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the other side is gone, which `receive` tells; or this one is closed
            return len(data)

    def _write_backlog(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog)
            poll.poll()
            with self._changed:
                rest = self._backlog[0]
                taken = self._write(rest)
                self._num_unsent -= taken
                rest = rest[taken:]
                if rest:
                    self._backlog[0] = rest
                else:
                    self._backlog.popleft()
                    self._changed.notify_all()
