"""The outermost layer around every request: an id, a bound on its body, the last resort for errors, one line of log.

The log line is of numbers and names, never of a client's text: no prompt, no answer, no header.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peftkit_serve.http.errors import ApiError, internal, unavailable
from peftkit_serve.http.logs import fault
from peftkit_serve.http.sse import CLIENT_GONE

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
UPLOAD_PATH = "/v1/adapters"
_FORM_BYTES = 2**16
"""What a form may have beside its files."""
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""Of every answer that doesn't say it otherwise: it is data for who asked, not a page, and is kept nowhere."""
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked for every few seconds by machines: logged at debug level."""


def report(error: Exception, request_id: str) -> ApiError:
    """Logs a fault of ours, and returns what a client is told of it."""
    logger.error({"request_id": request_id, **fault(error)})
    return internal()


class Guard:
    """ASGI middleware. Routes find `request.state.request_id`, and add to `request.state.facts` what the log line and
    nobody else shall know of a request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_upload_bytes: int,
        body_timeout_s: float,
        upload_timeout_s: float,
        answers: Counter,
    ) -> None:
        """
        max_body_bytes: a longer body is refused with 413.
        max_upload_bytes: the same for the route that takes adapters' files.
        body_timeout_s, upload_timeout_s: a body that is not there by then is refused with 408.
        answers: counts answers by route, as the OpenAPI page has it, and status.
        """
        self._app = app
        self._bounds = (max_body_bytes, body_timeout_s)
        self._upload_bounds = (max_upload_bytes + _FORM_BYTES, upload_timeout_s)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # a slash too many is no other resource: a redirect would lose a body, or a key, on its way
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        start, status = time.monotonic(), 0
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, facts=facts)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                said = {name.lower() for name, _ in message["headers"]}
                added = [*_HEADERS, (b"x-request-id", request_id.encode())]
                headers = [*message["headers"], *(header for header in added if header[0] not in said)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            bounds = self._upload_bounds if scope["path"] == UPLOAD_PATH else self._bounds
            await self._app(scope, _bounded(receive, headers, *bounds), send_with_id)
        except asyncio.CancelledError:  # the server has waited long enough: uvicorn would answer 500
            if not status:
                answer = unavailable("the server went away before the request was answered")
                await answer.response()(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # before its body was there: nobody waits for an answer
        except Exception as error:
            answer = report(error, request_id)
            if not status:  # else the answer has begun, and the server closes the connection on its missing end
                await answer.response()(scope, receive, send_with_id)
        finally:
            status = status or CLIENT_GONE
            self._answers.labels(getattr(scope.get("route"), "path", "unknown"), str(status)).inc()
            line = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
            line |= {"ms": round(1000 * (time.monotonic() - start), 1), **facts}
            logger.log(logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO, line)


def _bounded(receive: Receive, headers: Mapping[bytes, bytes], limit: int, timeout_s: float) -> Receive:
    """`receive` that refuses a body that is too late, or too long: before reading it where its length is declared."""
    declared = headers.get(b"content-length", b"")
    announced = declared.isdigit() and int(declared[:20]) > limit
    deadline: float | None = asyncio.get_running_loop().time() + timeout_s
    seen = 0

    async def bounded() -> Message:
        nonlocal seen, deadline
        if announced:
            raise _too_large(limit)
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            late = f"the request's body was not there after {timeout_s:g} s"
            raise ApiError(408, late, code="request_timeout") from None
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            deadline = None  # from now on it is waited for the client's going away
        return message

    return bounded


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", code="request_too_large")
