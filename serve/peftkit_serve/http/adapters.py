"""Adapters over HTTP: upload, versions, canaries, rollback and removal; vLLM's two routes beside them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import PlainTextResponse

from peftkit.errors import AdapterError, InputError
from peftkit_serve.http.access import administrator, bearer
from peftkit_serve.http.body import StrictRoute, parse_json
from peftkit_serve.http.errors import ApiError
from peftkit_serve.http.management import (
    AdapterByPath,
    AdapterCard,
    AdapterList,
    LoadLora,
    NewWeights,
    Published,
    Removed,
    UnloadLora,
    VersionCard,
)
from peftkit_serve.http.openai import ERRORS
from peftkit_serve.http.service import Service
from peftkit_serve.tenants.catalog import NotThere
from peftkit_serve.tenants.content import MAX_FILES, Arrival
from peftkit_serve.tenants.records import SHARED, tenant_of

_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "files"],
                    "properties": {
                        "name": {"type": "string"},
                        "tenant": {"type": "string", "description": "Whose it is; left out, it is shared."},
                        "files": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                            "description": "adapter_config.json, adapter_model.safetensors and, where there is one, "
                            "peftkit.json; or one .zip, .tar or .tar.gz of them, or of their folder.",
                        },
                    },
                }
            },
            "application/json": {"schema": AdapterByPath.model_json_schema()},
        },
    }
}

_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Done."}
}


router = APIRouter(
    prefix="/v1",
    tags=["Adapters"],
    responses=ERRORS,
    route_class=StrictRoute,
    dependencies=[Depends(bearer), Depends(administrator)],
)
"""The administrator's routes for adapters. `?tenant=` says whose; without it they are the shared ones."""


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _owner(request: Request, tenant: str | None = None) -> str:
    return _known(request, tenant)


TheService = Annotated[Service, Depends(_service)]
Owner = Annotated[str, Depends(_owner)]


@router.post("/adapters", status_code=201, openapi_extra=_UPLOAD)
async def add_adapter(request: Request, service: TheService, tenant: str | None = None) -> Published:
    """A new adapter, or a new version of one, by upload or from a folder under an allowed root.

    `tenant` may stand in the body instead."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "multipart/form-data":
        body = AdapterByPath.model_validate(_object(parse_json(await request.body())))
        return await _from_path(service, _known(request, _same(tenant, body.tenant)), body.name, body.path)
    fields, files = await _form(request)
    try:
        owner, name = _known(request, _same(tenant, fields.get("tenant"))), fields["name"]

        def fill(arrival: Arrival) -> None:
            for file in files:
                arrival.write(file.filename or "", file.file)

        return await _published(service, owner, name, fill)
    finally:
        for file in files:
            await file.close()


@router.get("/adapters")
async def list_adapters(service: TheService, owner: Owner) -> AdapterList:
    """Adapters with their versions; among the shared ones those that the server was started with."""
    catalog = service.catalog
    cards = [AdapterCard.of(adapter, catalog.shelf) for adapter in catalog.list_owned(owner)]
    return AdapterList(data=sorted([*cards, *_fixed(service, owner)], key=lambda card: card.name))


@router.get("/adapters/{name}")
async def show_adapter(name: str, service: TheService, owner: Owner) -> AdapterCard:
    """One adapter with its versions."""
    if card := next((card for card in _fixed(service, owner) if card.name == name), None):
        return card
    return AdapterCard.of(service.catalog.owned(owner, name), service.catalog.shelf)


@router.post("/adapters/{name}/aliases")
async def set_weights(name: str, body: NewWeights, service: TheService, owner: Owner) -> AdapterCard:
    """Sends shares of a name's requests to versions; running requests finish on theirs."""
    weights = {int(number): share for number, share in body.weights.items()}
    return AdapterCard.of(await service.catalog.set_weights(owner, name, weights), service.catalog.shelf)


@router.post("/adapters/{name}/rollback")
async def roll_back(name: str, service: TheService, owner: Owner) -> AdapterCard:
    """Back to where a name's requests went before."""
    return AdapterCard.of(await service.catalog.roll_back(owner, name), service.catalog.shelf)


@router.delete("/adapters/{name}")
async def remove_adapter(name: str, service: TheService, owner: Owner) -> Removed:
    """Removes `name`, or `name@version`, waits for its requests to end, and frees its memory."""
    bare, marked, number = name.partition("@")
    if marked and not (number.isascii() and number.isdigit() and len(number) < 10):
        raise NotThere(f"there is no adapter '{name[:128]}'", field="name")
    version = int(number) if marked else None
    freed = await service.catalog.remove(owner, bare, version)
    return Removed(name=bare, version=version, freed_bytes=freed)


@router.post("/load_lora_adapter", response_model=None, responses=_TEXT)
async def load_lora_adapter(body: LoadLora, service: TheService, owner: Owner) -> PlainTextResponse:
    """As vLLM has it: an adapter from a folder under an allowed root."""
    if not body.load_inplace and any(one.name == body.lora_name for one in service.catalog.list_owned(owner)):
        raise ApiError(
            400,
            f"the adapter '{body.lora_name[:128]}' is loaded already: say load_inplace for a new version",
            param="lora_name",
            code="name_taken",
        )
    with _vllms_names():
        await _from_path(service, owner, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter", response_model=None, responses=_TEXT)
async def unload_lora_adapter(body: UnloadLora, service: TheService, owner: Owner) -> PlainTextResponse:
    """As vLLM has it, but it frees the memory, after the last request that uses it."""
    with _vllms_names():
        await service.catalog.remove(owner, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _known(request: Request, tenant: str | None) -> str:
    """The owner that a tenant is, or without one that of the shared adapters."""
    if tenant is None:
        return SHARED
    if tenant not in request.app.state.database.snapshot.tenants:
        raise ApiError(404, f"there is no tenant {tenant[:128]!r}", param="tenant", code="not_found")
    return tenant


def _fixed(service: Service, owner: str) -> list[AdapterCard]:
    """Adapters that the server was started with, which are among the shared ones."""
    entries = service.static_entries() if owner == SHARED else []
    return [AdapterCard.fixed_one(entry, service.created) for entry in entries]


async def _from_path(service: Service, owner: str, name: str, path: str) -> Published:
    folder = _contained(path, service.settings.adapter_roots)
    return await _published(service, owner, name, lambda arrival: arrival.copy(folder))


async def _published(service: Service, owner: str, name: str, fill: Callable[[Arrival], None]) -> Published:
    version = await service.catalog.publish(owner, name, fill)
    # as it came: others may have changed or removed the name since
    card = VersionCard.of(version, 1.0, service.catalog.shelf)
    return Published(name=name, tenant=tenant_of(owner), **card.model_dump())


async def _form(request: Request) -> tuple[dict[str, str], list[UploadFile]]:
    """The fields and files of an upload; files lie on the disk while they are large."""
    try:
        form = await request.form(max_files=MAX_FILES, max_fields=8, max_part_size=4096)
    except (MultiPartException, HTTPException, ValueError) as error:
        if isinstance(error, ApiError):  # the guard's: the body is too large
            raise
        reason = getattr(error, "message", None) or getattr(error, "detail", None) or str(error)
        raise ApiError(400, f"the upload can't be read: {reason}", code="invalid_upload") from None
    files = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
    fields = {key: part for key, part in form.multi_items() if isinstance(part, str)}
    if unknown := set(fields) - {"name", "tenant"}:
        shown = min(unknown)[:64]
        raise ApiError(400, f"unknown field {shown!r}", param=shown, code="unknown_parameter")
    for name, given in (("name", fields.get("name")), ("files", files)):
        if not given:
            raise ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    return fields, files


@contextmanager
def _vllms_names() -> Iterator[None]:
    """Errors name the fields that a client of vLLM has sent; what is wrong with an adapter itself is with its path."""
    try:
        yield
    except InputError as error:
        error.field = {"name": "lora_name", "tenant": "tenant"}.get(error.field or "", "lora_path")
        raise


def _same(asked: str | None, given: str | None) -> str | None:
    """The tenant of a query and a body, either of which may name none."""
    if None not in (asked, given) and asked != given:
        raise ApiError(400, "tenant: the query and the body name different ones", param="tenant", code="invalid_value")
    return given if asked is None else asked


def _object(value: object) -> object:
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object, or an upload by multipart/form-data", code="invalid_json")
    return value


def _contained(path: str, roots: tuple[Path, ...]) -> Path:
    """The real folder that a path names, which must lie under an allowed root."""
    message = "the path must be an adapter's folder under one of the roots that the server was started with"
    if "\0" in path:
        raise InputError(message, field="path")
    try:
        folder = Path(path).resolve()
        allowed = any(folder.is_relative_to(root.resolve()) for root in roots)
        # what lies outside is answered alike whether it is there or not
        if allowed and folder.is_dir():
            for inner in folder.rglob("*"):
                if not any(inner.resolve().is_relative_to(root.resolve()) for root in roots):
                    raise AdapterError("a file of the adapter's folder lies outside the allowed roots")
            return folder
    except (OSError, RuntimeError):
        pass
    raise InputError(message, field="path")
