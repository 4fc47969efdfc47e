"""The HTTP service: the OpenAI API over a `ServedEngine`.

Importing this is light: each name comes when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peftkit_serve.http.app import create_app
    from peftkit_serve.http.logs import write_json_lines
    from peftkit_serve.http.server import bind, is_loopback, serve, url_of
    from peftkit_serve.http.settings import Settings

__all__ = ["create_app", "Settings", "bind", "is_loopback", "serve", "url_of", "write_json_lines"]

_MODULES = {"create_app": "app", "Settings": "settings", "write_json_lines": "logs"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'server')}"), name)
