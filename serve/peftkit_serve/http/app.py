"""The application: routes, the guard around them, and the engine's start and stop with the server's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import anyio.to_thread
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from peftkit_serve.async_engine import AsyncEngine
from peftkit_serve.http import errors
from peftkit_serve.http.guard import Guard
from peftkit_serve.http.openai import create_router
from peftkit_serve.http.schemas import Status
from peftkit_serve.http.service import Service

MAX_BODY_BYTES = 8 * 2**20


def create_app(async_engine: AsyncEngine, *, served_name: str, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The HTTP service of an engine, which is started and stopped with the application.

    served_name: what `model` calls the base.
    max_body_bytes: a request's body beyond this is refused with 413.

    `app.state.service` is the `Service`: setting its `draining` makes `/ready` and new requests answer 503.
    """
    service = Service(async_engine, served_name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(async_engine.stop)

    app = FastAPI(
        title="peftkit",
        version=version("peftkit"),
        summary="One frozen base and its adapters, with the OpenAI API",
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(Guard, max_body_bytes=max_body_bytes, answers=service.metrics.http_answers)
    errors.install(app)
    app.include_router(create_router(service))
    _add_operations(app, service)
    return app


def _add_operations(app: FastAPI, service: Service) -> None:
    """The routes that machines ask every few seconds."""

    @app.get("/health", tags=["Operations"])
    async def health() -> Status:
        """The process answers."""
        return Status(status="ok")

    @app.get("/ready", tags=["Operations"], responses={503: {"model": Status, "description": "Not now."}})
    async def ready(response: Response) -> Status:
        """Whether new requests are taken."""
        if service.ready:
            return Status(status="ready")
        response.status_code = 503
        return Status(status="draining" if service.draining else "not ready")

    @app.get(
        "/metrics",
        tags=["Operations"],
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."}
        },
    )
    async def metrics() -> Response:
        """Counts and times of this server."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
