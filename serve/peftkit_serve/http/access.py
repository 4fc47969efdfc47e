"""Who asks: a tenant by its key, the administrator by another, or anyone where no key is needed.

| route | needs |
| --- | --- |
| inference, names | a tenant's key or an admin key, once there is a tenant |
| adapters, tenants, metrics | an admin key, once there is any key |
| health, readiness, OpenAPI, the console's files | nothing |

Without any key everything is open to this machine alone, and administration only to what no other site's page can
send from a browser.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.security import HTTPBearer

from peftkit_serve.http.errors import ApiError
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.keys import matches, parse
from peftkit_serve.tenants.records import Key, Limits, Tenant

bearer = HTTPBearer(auto_error=False, description="A tenant's key for inference, an admin key for administration.")
"""For the OpenAPI page; `Access` reads the header itself."""

_NOBODY = Key("", None, b"", b"", 0.0)
_OPERATOR = Limits(max_queue=None)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks; without a tenant it is the operator."""

    tenant: Tenant | None = None

    @property
    def name(self) -> str:
        """The tenant's name, or nothing."""
        return "" if self.tenant is None else self.tenant.name

    @property
    def limits(self) -> Limits:
        """What it may use."""
        return _OPERATOR if self.tenant is None else self.tenant.limits


class Access:
    """Answers for each request who may do what; FastAPI's dependencies are its methods."""

    def __init__(self, database: Database, *, open_admin: bool, require_key: bool) -> None:
        self._database = database
        self._open_admin = open_admin
        self._require_key = require_key

    async def caller(self, request: Request) -> Caller:
        """Who asks for inference. Raises 401."""
        key = self._key(request)
        snapshot = self._database.snapshot
        if key is not None:
            tenant = None if key.tenant is None else snapshot.tenants.get(key.tenant)
            if key.tenant is None or tenant is not None:
                request.state.facts["tenant"] = key.tenant or ""
                return Caller(tenant)
        if snapshot.tenants or self._require_key:
            raise _unauthorized(request, "a tenant's key")
        return Caller()

    async def admin(self, request: Request) -> None:
        """Lets the administrator pass. Raises 401."""
        key = self._key(request)
        if key is not None and key.tenant is None:
            return
        if self._database.snapshot.keys or not self._open_admin or not _is_own_page(request):
            raise _unauthorized(request, "an admin key")

    def _key(self, request: Request) -> Key | None:
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        parsed = parse(text.strip()) if scheme.lower() == "bearer" else None
        if parsed is None:
            return None
        key = self._database.snapshot.keys.get(parsed[0])
        # an unknown id takes as long as a wrong secret
        good = matches(parsed[1], (key or _NOBODY).salt, (key or _NOBODY).digest)
        return key if good else None


async def administrator(request: Request) -> None:
    """`Access.admin` of the application that is asked, for routes that are written before there is one."""
    access: Access = request.app.state.access
    await access.admin(request)


def asks_for_key(dependency: Callable[..., Any]) -> bool:
    """Whether one of FastAPI's dependencies is of this module."""
    return dependency is administrator or isinstance(getattr(dependency, "__self__", None), Access)


def _is_own_page(request: Request) -> bool:
    """Whether a browser can have sent this only from a page of this server: no other site's page may administer it."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
    return local and (origin is None or urlsplit(origin).netloc == host)


def _unauthorized(request: Request, wanted: str) -> ApiError:
    given = "authorization" in request.headers
    message = f"this needs {wanted}: " + (
        "the one that was sent is not valid" if given else "send it as 'Authorization: Bearer <key>'"
    )
    code = "invalid_api_key" if given else "missing_api_key"
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})
