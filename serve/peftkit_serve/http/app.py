"""The application: state and routes, the guard around them, and the engine's start and stop with the server's."""

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
from fastapi import Depends, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from peftkit.base import BaseInfo
from peftkit.errors import RunError
from peftkit_serve.async_engine import ServedEngine
from peftkit_serve.http import adapters, console_page, errors, openai, tenants
from peftkit_serve.http.access import Access, bearer
from peftkit_serve.http.answers import Status
from peftkit_serve.http.guard import Guard
from peftkit_serve.http.logs import fault
from peftkit_serve.http.service import Service
from peftkit_serve.http.settings import Settings
from peftkit_serve.http.tracing import Tracing, fastapi_telemetry
from peftkit_serve.http.watch import Watcher
from peftkit_serve.templates.renderer import Templates
from peftkit_serve.tenants.catalog import Catalog
from peftkit_serve.tenants.content import Contents
from peftkit_serve.tenants.database import LOST, Database
from peftkit_serve.tenants.shelf import Shelf

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

logger = logging.getLogger(__name__)


def create_app(
    engine: ServedEngine,
    *,
    served_name: str,
    settings: Settings | None = None,
    tracer_provider: "TracerProvider | None" = None,
) -> FastAPI:
    """The HTTP service of an engine, which is started and stopped with the application.

    served_name: what `model` calls the base.
    tracer_provider: OpenTelemetry's, to trace requests with; who made it shuts it down.

    `app.state.service` is the `Service`: setting its `draining` makes `/ready` and new requests answer 503.
    Raises InputError for a database that can't be used.
    """
    settings = settings or Settings()
    resources = ExitStack()
    store = settings.store or Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="peftkit-serve-")))
    base_id = scope_of(engine.base)
    database = Database(settings.database or f"sqlite:///{store / 'state.db'}", base_id)
    resources.callback(database.close)
    contents = Contents(store / "adapters" / base_id[:16], max_bytes=settings.max_upload_bytes)
    shelf = Shelf(engine, contents.kept, max_bytes=settings.host_bytes)
    templates = Templates(engine.tokenizer)
    resources.callback(templates.close)
    catalog = Catalog(engine, database, contents, shelf, templates, served_name, settings.watched)
    service = Service(engine, served_name, catalog, templates, settings)
    access = Access(database, open_admin=settings.open_admin, require_key=settings.require_key)
    watcher = None
    if settings.watched is not None and catalog.watched_owner is not None:
        watcher = Watcher(settings.watched, catalog, catalog.watched_owner)

    app = FastAPI(
        title="peftkit",
        version=version("peftkit"),
        summary="One frozen base and its adapters, with the OpenAI API",
        lifespan=_lifespan(service, watcher, resources),
        telemetry=fastapi_telemetry(tracer_provider),
        docs_url=None,  # FastAPI's pages load scripts from elsewhere: `console_page` has one that doesn't
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service, app.state.database, app.state.access = service, database, access
    app.add_middleware(
        Guard,
        max_body_bytes=settings.max_body_bytes,
        max_upload_bytes=settings.max_upload_bytes,
        body_timeout_s=settings.body_timeout_s,
        upload_timeout_s=settings.request_timeout_s,
        answers=service.metrics.http_answers,
    )
    errors.install(app, service.metrics.refused)
    tracing = None if tracer_provider is None else Tracing(tracer_provider)
    app.include_router(openai.create_router(service, access, tracing))
    app.include_router(adapters.router)
    app.include_router(tenants.router)
    app.include_router(console_page.create_router())
    _add_operations(app, service, access, database)
    return app


def _lifespan(
    service: Service, watcher: Watcher | None, resources: ExitStack
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Starts the engine and what goes on beside it; ends them, and frees `resources`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        await service.catalog.tidy()
        if watcher is not None:
            await watcher.look()
        polling = _poll(service.catalog, watcher, service.settings.poll_s)
        tasks = [asyncio.create_task(work) for work in (polling, service.start_templates())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await anyio.to_thread.run_sync(service.engine.stop)
            resources.close()

    return lifespan


def scope_of(base: BaseInfo) -> str:
    """What tells a base's adapters from others in the same database: the same for all precisions of its weights."""
    mark = base.fingerprint
    # the empty last part is in the databases that are there
    return hashlib.sha256("\0".join((mark.architecture, mark.config, mark.tokenizer, "")).encode()).hexdigest()


async def _poll(catalog: Catalog, watcher: Watcher | None, period_s: float) -> None:
    """Sees what others have changed: in the database, and in the watched folder. It ends with the server alone."""
    said = ""
    while True:
        await asyncio.sleep(period_s)
        try:
            await catalog.refresh()
            if watcher is not None:
                await watcher.look()
            said = ""
        except RunError as error:  # what was read last stays true until it answers again
            if str(error) != said:
                said = str(error)
                logger.warning("%s", said)
        except Exception as error:  # a fault of ours: keys are still to be revoked
            logger.error(fault(error))


def _add_operations(app: FastAPI, service: Service, access: Access, database: Database) -> None:
    """The routes that machines ask every few seconds."""

    @app.get(
        "/health",
        tags=["Operations"],
        response_model_exclude_none=True,
        responses={503: {"model": Status, "description": "The engine died."}},
    )
    async def health(response: Response) -> Status:
        """The process answers and its engine has not died: that takes a new process."""
        if service.engine.died and not service.draining:
            response.status_code = 503
            return Status(status="not ready")
        return Status(status="ok")

    @app.get(
        "/ready",
        tags=["Operations"],
        response_model_exclude_none=True,
        responses={503: {"model": Status, "description": "Not now."}},
    )
    async def ready(response: Response) -> Status:
        """Whether new requests are taken, and changes are kept."""
        lost = not await asyncio.to_thread(lambda: database.is_there)
        if service.ready and not lost:
            return Status(status="ready")
        response.status_code = 503
        if service.draining:
            return Status(status="draining")
        return Status(status="not ready", reason=LOST if lost else None)

    @app.get(
        "/metrics",
        tags=["Operations"],
        response_class=Response,
        dependencies=[Depends(bearer), Depends(access.admin)],
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."},
            **openai.ERRORS,
        },
    )
    async def metrics() -> Response:
        """Counts and times of this server. Needs the admin key, because it names tenants and adapters."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
