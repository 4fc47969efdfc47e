"""Tenants and their keys over HTTP, for the administrator."""

import asyncio
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from peftkit_serve.http.access import Access, bearer
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


def create_router(service: Service, access: Access, database: Database) -> APIRouter:
    """The administrator's routes for tenants."""
    guards = [Depends(bearer), Depends(access.admin)]
    router = APIRouter(
        prefix="/v1/tenants", tags=["Tenants"], responses=ERRORS, route_class=StrictRoute, dependencies=guards
    )

    def found(name: str) -> Tenant:
        tenant = database.snapshot.tenants.get(name)
        if tenant is None:
            raise ApiError(404, f"there is no tenant {name[:128]!r}", param="name", code="not_found")
        return tenant

    def keys_of(name: str) -> list[Key]:
        return [key for key in database.snapshot.keys.values() if key.tenant == name]

    def card(tenant: Tenant) -> TenantCard:
        admission = service.admission
        return TenantCard.of(
            tenant, keys_of(tenant.name), admission.num_live(tenant.name), admission.num_waiting(tenant.name)
        )

    @router.get("")
    async def list_tenants() -> TenantList:
        """All tenants by name."""
        return TenantList(data=[card(tenant) for tenant in database.snapshot.tenants.values()])

    @router.post("", status_code=201)
    async def add_tenant(body: NewTenant) -> TenantWithKey:
        """A new tenant with its first key, which is shown this once. From now on inference needs a key."""
        check_name(body.name)
        key = await asyncio.to_thread(database.add_tenant, body.name, body.limits.limits(), body.adapters)
        return TenantWithKey(key=key.text, **card(found(body.name)).model_dump())

    @router.get("/{name}")
    async def show_tenant(name: str) -> TenantCard:
        """One tenant with its limits, its keys' ids and what it does at the moment."""
        return card(found(name))

    @router.patch("/{name}")
    async def change_tenant(name: str, body: ChangedTenant) -> TenantCard:
        """Changes limits or shared adapters; what is left out stays. It holds for the next request."""
        tenant = found(name)
        limits = None
        if body.limits is not None:
            limits = LimitsBody.model_validate(tenant.limits.plain() | body.limits).limits()
        await asyncio.to_thread(database.set_tenant, name, limits, body.adapters)
        return card(found(name))

    @router.delete("/{name}", status_code=204, responses=_NOTHING)
    async def remove_tenant(name: str) -> Response:
        """Removes a tenant with its keys and adapters; its running requests end as they would."""
        found(name)
        await service.catalog.remove_tenant(name)
        return Response(status_code=204)

    @router.post("/{name}/keys", status_code=201)
    async def add_key(name: str) -> ShownKey:
        """One more key, shown this once: to change keys, add one, give it out, revoke the old one."""
        found(name)
        key = await asyncio.to_thread(database.add_key, name)
        return ShownKey(id=key.id, key=key.text)

    @router.get("/{name}/keys")
    async def list_keys(name: str) -> list[KeyCard]:
        """The ids of a tenant's keys."""
        found(name)
        return [KeyCard.of(key) for key in keys_of(name)]

    @router.delete("/{name}/keys/{key_id}", status_code=204, responses=_NOTHING)
    async def remove_key(name: str, key_id: str) -> Response:
        """Revokes a key: the next request with it is refused."""
        found(name)
        if not any(key.id == key_id for key in keys_of(name)):
            raise ApiError(404, f"there is no key {key_id[:64]!r}", param="key", code="not_found")
        await asyncio.to_thread(database.remove_key, name, key_id)
        return Response(status_code=204)

    return router
