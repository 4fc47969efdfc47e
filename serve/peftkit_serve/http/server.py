"""The process around the application: one bound socket, signals, and a drain before the end."""

import asyncio
import errno
import gc
import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import anyio.to_thread
import uvicorn
from fastapi import FastAPI

from peftkit.errors import InputError, RunError
from peftkit_serve.http.protocol import BoundedHttp
from peftkit_serve.http.service import Service


def bind(host: str, port: int, *, any_client: bool) -> socket.socket:
    """A socket bound to an address but not listening, so that a port in use is known before a model is loaded.

    any_client: whether an address that others than this machine can reach is allowed.

    Raises InputError for a host that can't be used or isn't allowed, RunError for a port in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise InputError(f"--host {host}: no such address", field="host") from None
    family, kind, _, _, address = found[0]
    if not any_client and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise InputError(
            f"--host {host}: this server asks for no key, so it listens on loopback only: add a tenant "
            "(peftkit tenants add), leave --host out, or say --no-auth to answer everyone who reaches it",
            field="host",
        )
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether nobody but this machine reaches a bound socket."""
    return ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves `app`, made by `create_app`, on a bound socket until SIGTERM or SIGINT.

    Then it drains: `/ready` and new requests answer 503 while running requests end, for at most the settings'
    `drain_timeout_s`; a second signal ends them at once.
    `on_ready` is called when the first request can be answered. Raises RunError when another process listens there,
    and at the end when that came because the engine had died.
    """
    try:
        listener.listen(2048)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _unusable(host, port, error) from None
    _allow_connections()
    try:
        _Server(app, on_ready).run(sockets=[listener])
        if app.state.service.engine.died:
            raise RunError("the engine died, and the server ended with it: its log says why")
    finally:
        gc.unfreeze()  # what stays frozen is never freed, and libraries complain of it when the process ends


_UNREAD_S = 2.0
"""How long a client may take nothing at all of an answer that is complete, while the server is going away."""


class _Server(uvicorn.Server):
    """uvicorn, but a signal drains before the socket is closed, and is not raised again at the end."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=65,  # longer than clients and proxies keep an idle connection: they close it, not we
                timeout_graceful_shutdown=5,
            )
        )
        self._service: Service = app.state.service
        self._on_ready = on_ready
        self._deadline: float | None = None
        self._unread: dict[BoundedHttp, tuple[int, float]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # all that a full collection would walk through, in the middle of a step, to free none of it
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._deadline = now + self._service.settings.drain_timeout_s if self._deadline is None else now
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is None and self._service.engine.died:  # /health has said so since
            self._deadline = time.monotonic() + self._service.settings.drain_timeout_s
        if self._deadline is not None:
            self._drop_unread()
            if not self.server_state.tasks and not self._unread:
                self.should_exit = True
            elif time.monotonic() >= self._deadline:
                await anyio.to_thread.run_sync(self._service.engine.stop)  # what still runs ends with an error
                self.should_exit = True
        return await super().on_tick(counter)

    def _drop_unread(self) -> None:
        """A client that takes nothing is waited for no longer, once the engine has said all that it had to say."""
        stats, now = self._service.engine.stats(), time.monotonic()
        busy = self._service.engine.alive and (stats["requests_running"] or stats["requests_waiting"])
        waiting = {one: num_bytes for one in self._connections() if (num_bytes := _num_unread(one.transport))}
        before, self._unread = self._unread, {}
        for connection, num_bytes in waiting.items():
            last, since = before.get(connection, (-1, now))
            self._unread[connection] = (num_bytes, since if num_bytes == last else now)
            if now - self._unread[connection][1] >= _UNREAD_S and not busy:
                connection.transport.abort()

    def _connections(self) -> list[BoundedHttp]:
        return [one for one in self.server_state.connections if isinstance(one, BoundedHttp)]


def _num_unread(transport: asyncio.Transport) -> int:
    """Bytes that a client has not acknowledged, where some of them have found no place in the kernel yet."""
    num_bytes = transport.get_write_buffer_size()
    if num_bytes and sys.platform != "win32":
        import fcntl
        import termios

        sent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        num_bytes += int.from_bytes(sent, sys.byteorder)
    return num_bytes


def _allow_connections() -> None:
    """A connection is an open file, and the usual limit of 1024 is less than the answers that may run and wait."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _unusable(host: str, port: int, error: OSError) -> RunError:
    if error.errno == errno.EADDRINUSE:
        return RunError(f"port {port} of {host} is in use: stop what listens there, or choose another port")
    return RunError(f"can't listen on port {port} of {host}: {error.strerror}")
