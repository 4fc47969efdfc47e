"""Reading a JSON body: after it is known who sends it; what json accepts and a client can't have meant is refused."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from peftkit_serve.http.access import Access
from peftkit_serve.http.errors import ApiError


class StrictRoute(APIRoute):
    """A route that asks for its key before it reads a body, whose JSON has each name once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        calls = [dependency.call for dependency in self.dependant.dependencies]
        checks = [call for call in calls if call is not None and isinstance(getattr(call, "__self__", None), Access)]

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


def parse_json(body: bytes) -> Any:
    """The value of a JSON text. Raises 400 for what is none, and for an object that has a key twice."""
    try:
        return json.loads(body, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:
        reason = "a number has too many digits"
    raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        shown = twice[:64].encode(errors="backslashreplace").decode()
        raise ApiError(400, f"{shown} is given twice", param=shown, code="duplicate_parameter")
    return found
