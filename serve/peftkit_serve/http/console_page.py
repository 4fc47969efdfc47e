"""`/console`, and `/docs` with every route: files of our own, and headers that let a browser load nothing else."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from peftkit_serve.http.errors import ApiError

_FOLDER = Path(__file__).with_name("console")
_FILES = {"console.css": "text/css", "console.js": "text/javascript", "reference.js": "text/javascript"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_router() -> APIRouter:
    """The pages and their files: they hold nothing that needs a key, and the console asks for one to show anything."""
    router = APIRouter(include_in_schema=False)

    @router.get("/console")
    async def page() -> Response:
        return FileResponse(_FOLDER / "index.html", media_type="text/html", headers=_HEADERS)

    @router.get("/docs")
    async def reference() -> Response:
        return FileResponse(_FOLDER / "reference.html", media_type="text/html", headers=_HEADERS)

    @router.get("/console/{file}")
    async def part(file: str) -> Response:
        if file not in _FILES:
            raise ApiError(404, "there is no such file", code="not_found")
        return FileResponse(_FOLDER / file, media_type=_FILES[file], headers=_HEADERS)

    return router
