"""Tenants and their keys over HTTP, for the administrator."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from peftkit_serve.http.access import administrator, bearer
from peftkit_serve.http.body import StrictRoute
from peftkit_serve.http.errors import ApiError
from peftkit_serve.http.management import (
    ChangedTenant,
    KeyCard,
    LimitsBody,
    NewTenant,
    ShownKey,
    TenantCard,
    TenantList,
    TenantWithKey,
)
from peftkit_serve.http.openai import ERRORS
from peftkit_serve.http.service import Service
from peftkit_serve.tenants.database import Database
from peftkit_serve.tenants.names import check_name
from peftkit_serve.tenants.records import Key, Tenant

_NOTHING: dict[int | str, dict[str, Any]] = {204: {"description": "Done."}}


router = APIRouter(
    prefix="/v1/tenants",
    tags=["Tenants"],
    responses=ERRORS,
    route_class=StrictRoute,
    dependencies=[Depends(bearer), Depends(administrator)],
)
"""The administrator's routes for tenants."""


class _Office:
    """What the routes work on: the state, and who is being answered."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.database: Database = request.app.state.database

    def tenant(self, name: str) -> Tenant:
        """A tenant. Raises 404."""
        tenant = self.database.snapshot.tenants.get(name)
        if tenant is None:
            raise ApiError(404, f"there is no tenant {name[:128]!r}", param="name", code="not_found")
        return tenant

    def keys(self, name: str) -> list[Key]:
        """A tenant's keys."""
        return [key for key in self.database.snapshot.keys.values() if key.tenant == name]

    def card(self, tenant: Tenant) -> TenantCard:
        """How a tenant is shown."""
        name, admission = tenant.name, self.service.admission
        return TenantCard.of(tenant, self.keys(name), admission.num_live(name), admission.num_waiting(name))


async def _office(request: Request) -> _Office:
    return _Office(request)


Office = Annotated[_Office, Depends(_office)]


@router.get("")
async def list_tenants(office: Office) -> TenantList:
    """All tenants by name."""
    return TenantList(data=[office.card(tenant) for tenant in office.database.snapshot.tenants.values()])


@router.post("", status_code=201)
async def add_tenant(body: NewTenant, office: Office) -> TenantWithKey:
    """A new tenant with its first key, which is shown this once. From now on inference needs a key."""
    check_name(body.name)
    key = await asyncio.to_thread(office.database.add_tenant, body.name, body.limits.limits(), body.adapters)
    return TenantWithKey(key=key.text, **office.card(office.tenant(body.name)).model_dump())


@router.get("/{name}")
async def show_tenant(name: str, office: Office) -> TenantCard:
    """One tenant with its limits, its keys' ids and what it does at the moment."""
    return office.card(office.tenant(name))


@router.patch("/{name}")
async def change_tenant(name: str, body: ChangedTenant, office: Office) -> TenantCard:
    """Changes limits or shared adapters; what is left out stays. It holds for the next request."""
    tenant = office.tenant(name)
    limits = None
    if body.limits is not None:
        limits = LimitsBody.model_validate(tenant.limits.plain() | body.limits).limits()
    await asyncio.to_thread(office.database.set_tenant, name, limits, body.adapters)
    return office.card(office.tenant(name))


@router.delete("/{name}", status_code=204, responses=_NOTHING)
async def remove_tenant(name: str, office: Office) -> Response:
    """Removes a tenant with its keys and adapters; its running requests end as they would."""
    office.tenant(name)
    await office.service.catalog.remove_tenant(name)
    return Response(status_code=204)


@router.post("/{name}/keys", status_code=201)
async def add_key(name: str, office: Office) -> ShownKey:
    """One more key, shown this once: to change keys, add one, give it out, revoke the old one."""
    office.tenant(name)
    key = await asyncio.to_thread(office.database.add_key, name)
    return ShownKey(id=key.id, key=key.text)


@router.get("/{name}/keys")
async def list_keys(name: str, office: Office) -> list[KeyCard]:
    """The ids of a tenant's keys."""
    office.tenant(name)
    return [KeyCard.of(key) for key in office.keys(name)]


@router.delete("/{name}/keys/{key_id}", status_code=204, responses=_NOTHING)
async def remove_key(name: str, key_id: str, office: Office) -> Response:
    """Revokes a key: the next request with it is refused."""
    office.tenant(name)
    if not any(key.id == key_id for key in office.keys(name)):
        raise ApiError(404, f"there is no key {key_id[:64]!r}", param="key", code="not_found")
    await asyncio.to_thread(office.database.remove_key, name, key_id)
    return Response(status_code=204)
