"""Every error answer, in OpenAI's body `{"error": {"message", "type", "param", "code"}}`.

| raised | status | type | code |
| --- | --- | --- | --- |
| a body that doesn't validate | 400 | invalid_request_error | unknown_parameter, invalid_value, … |
| `InputError` of the engine | 400 | invalid_request_error | invalid_value |
| no key, or a wrong one | 401 | authentication_error | missing_api_key, invalid_api_key |
| an adapter that isn't there, or another tenant's | 404 | invalid_request_error | model_not_found, not_found |
| a name that is taken, an adapter of another base | 409 | invalid_request_error | name_taken, wrong_base |
| an adapter that is too large, a tenant's quota | 413 | invalid_request_error | too_large, quota_exceeded |
| what can't be served faithfully | 422 | invalid_request_error | unsupported_adapter |
| a limit, or a full queue | 429 | rate_limit_error | queue_full, requests_limit_exceeded, … |
| `context_length_exceeded` | 400 | invalid_request_error | context_length_exceeded |
| `model_not_found` | 404 | invalid_request_error | model_not_found |
| a body that doesn't arrive | 408 | invalid_request_error | request_timeout |
| an unknown route or method | 404, 405 | invalid_request_error | – |
| a body over the limit | 413 | invalid_request_error | request_too_large |
| anything else | 500 | server_error | internal_error |
| draining or stopped | 503 | server_error | service_unavailable |
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from peftkit.errors import (
    AdapterError,
    BaseMismatchError,
    InputError,
    RunError,
    TooLargeError,
    UnsupportedError,
    did_you_mean,
)
from peftkit_serve.http.answers import ErrorBody, ErrorDetail
from peftkit_serve.tenants.admission import Refusal
from peftkit_serve.tenants.catalog import NotThere, Reserved
from peftkit_serve.tenants.database import NameInUse, QuotaExceeded

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}

_STATUSES: tuple[tuple[type[InputError], int, str], ...] = (
    (NotThere, 404, "not_found"),
    (NameInUse, 409, "name_taken"),
    (Reserved, 409, "name_taken"),
    (BaseMismatchError, 409, "wrong_base"),
    (TooLargeError, 413, "too_large"),
    (QuotaExceeded, 413, "quota_exceeded"),
    (UnsupportedError, 422, "unsupported_adapter"),
    (AdapterError, 400, "invalid_adapter"),
    (InputError, 400, "invalid_value"),
)
"""The first that fits."""


class ApiError(HTTPException):
    """An error answer. `param` is the field at fault; `code` is for programs, the message for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    def json(self) -> str:
        """The body. ASCII, because a client's own text in it may hold what is no Unicode character."""
        return json.dumps(self.body.model_dump())

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.json(), self.status_code, self.headers, "application/json")


def model_not_found(name: str, known: Iterable[str]) -> ApiError:
    """404: no base and no adapter is called `name`."""
    shown = name[:128]
    message = f"the model {shown!r} does not exist{did_you_mean(shown, known)}"
    return ApiError(404, message, param="model", code="model_not_found")


def context_length_exceeded(num_tokens: int, room: int, field: str) -> ApiError:
    """400: a prompt leaves no place for an answer; `room` is how many tokens text can use."""
    message = (
        f"this model's context has room for {room} tokens, and the prompt has {num_tokens}: "
        f"shorten {field} to at most {room - 1} tokens"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")


def text_too_long(num_chars: int, room: int, field: str) -> ApiError:
    """400: a prompt's text has more characters than the tokens have for which there is room."""
    message = (
        f"this model's context has room for {room} tokens, and the text of {field} has {num_chars} characters: "
        f"shorten {field}"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")


def from_input(error: InputError) -> ApiError:
    """What is the client's to mend, with the status that says of which kind it is."""
    status, code = next((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
    return ApiError(status, str(error), param=error.field, code=code)


def too_many(error: Refusal) -> ApiError:
    """429: a limit or a full queue, and when to come again."""
    headers = {"retry-after": str(error.retry_after_s)}
    return ApiError(429, str(error), code=error.code, headers=headers)


def timed_out(message: str) -> ApiError:
    """503: it took longer than the server lets a request take."""
    return ApiError(503, message, code="timeout", headers={"retry-after": "1"})


def unavailable(message: str) -> ApiError:
    """503: the server is going away; another one, or this one started again, can answer."""
    return ApiError(503, message, code="service_unavailable", headers={"retry-after": "1"})


def internal() -> ApiError:
    """500: a fault of ours; the log has it under the request's id."""
    return ApiError(500, "the server failed while it answered this request", code="internal_error")


def install(app: FastAPI, refused: Callable[[str, str], None]) -> None:
    """Answers every expected error of `app` in OpenAI's body; the unexpected are the guard's.

    refused: told of the tenant and the code of each refusal over a limit.
    """

    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    async def http_error(_: Request, error: HTTPException) -> Response:
        message = str(error.detail) or HTTPStatus(error.status_code).phrase
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def request_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _from_validation({**first, "loc": first["loc"][1:]}).response()  # without "body", "path" or "query"

    async def validation_error(_: Request, error: ValidationError) -> Response:
        return _from_validation(error.errors()[0]).response()

    async def input_error(_: Request, error: InputError) -> Response:
        return from_input(error).response()

    async def refusal(request: Request, error: Refusal) -> Response:
        refused(request.state.facts.get("tenant", ""), error.code)
        return too_many(error).response()

    async def run_error(_: Request, error: RunError) -> Response:
        return unavailable(str(error)).response()

    for kind, handler in (
        (ApiError, api_error),
        (HTTPException, http_error),
        (RequestValidationError, request_error),
        (ValidationError, validation_error),
        (InputError, input_error),
        (Refusal, refusal),
        (RunError, run_error),
    ):
        app.add_exception_handler(kind, handler)  # type: ignore[arg-type] # starlette types all handlers as Exception's


def _from_validation(first: Mapping[str, Any]) -> ApiError:
    """The first thing wrong with a body, with the path of its field as a client would write it."""
    kind: str = first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    context: Mapping[str, Any] = first.get("ctx") or {}
    path = _path([*first["loc"], *([context["field"]] if "field" in context else [])])
    if not path:
        message = "the body must be a JSON object, sent with the header Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    if kind == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    message = str(context.get("message") or f"{path}: {first['msg']}")
    code = kind if kind in ("unknown_parameter", "unsupported_parameter") else "invalid_value"
    return ApiError(400, message, param=path, code=code)


def _path(loc: Sequence[str | int]) -> str:
    """("messages", 0, "role") → "messages[0].role"."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
