"""Serving: many requests in one batch over one frozen base, each with its own adapter.

Importing this is light; `Engine`, `AsyncEngine` and `EngineProcess` bring torch and transformers with them when they
are first asked for.
"""

from typing import TYPE_CHECKING, Any

from peftkit_serve.request import Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from peftkit_serve.async_engine import AsyncEngine
    from peftkit_serve.engine import Engine
    from peftkit_serve.engine_process import EngineProcess

__all__ = ["Engine", "AsyncEngine", "EngineProcess", "Request", "SamplingParams", "RequestOutput"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from peftkit_serve.engine import Engine

        return Engine
    if name == "AsyncEngine":
        from peftkit_serve.async_engine import AsyncEngine

        return AsyncEngine
    if name == "EngineProcess":
        from peftkit_serve.engine_process import EngineProcess

        return EngineProcess
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
