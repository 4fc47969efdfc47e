"""Reading a JSON body: after it is known who sends it; what json accepts and a client can't have meant is refused."""

import json
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from peftkit_serve.http.access import asks_for_key
from peftkit_serve.http.errors import ApiError


class StrictRoute(APIRoute):
    """A route that asks for its key before it reads a body, whose JSON has each name once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        calls = [dependency.call for dependency in self.dependant.dependencies]
        checks = [call for call in calls if call is not None and asks_for_key(call)]

        async def handle(request: Request) -> Response:
            for check in checks:  # FastAPI's own turn comes when the body is read and parsed
                await check(request)
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle


class _StrictRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body())
        return self._json


_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair."""


def parse_json(body: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises 400 for what is none, for an object that has a key twice, and for text
    that holds half of a surrogate pair, which is no character."""
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_once)
        halves = _halves(value, "") if _HALF_PAIR.search(text) else iter(())
        if (field := next(halves, None)) is None:
            return value
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:
        reason = "a number has too many digits"
    else:
        message = f"{field or 'the body'}: the text holds half of a surrogate pair, which is no character"
        raise ApiError(400, message, param=field or None, code="invalid_value")
    raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _halves(value: Any, field: str) -> Iterator[str]:
    """The fields whose text is no text, as a client would write them: `messages[0].content`."""
    if isinstance(value, str) and not _is_text(value):
        yield field
    elif isinstance(value, dict):
        for name, inner in value.items():
            if not _is_text(name):
                yield field or _shown(name)
            yield from _halves(inner, _shown(f"{field}.{name}" if field else name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            # a list of texts is one field
            yield from _halves(inner, field if isinstance(inner, str) else f"{field}[{number}]")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(name: str) -> str:
    return name[:128].encode(errors="backslashreplace").decode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ApiError(400, f"{_shown(twice)} is given twice", param=_shown(twice), code="duplicate_parameter")
    return found
