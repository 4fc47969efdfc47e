"""`peftkit serve`: one base and many adapters over HTTP."""

import errno
import ipaddress
import json
import logging
import re
import socket
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer
import uvicorn

from peftkit import resources
from peftkit.cli import output
from peftkit.errors import AdapterError, InputError, RunError

if TYPE_CHECKING:
    from peftkit_serve.async_engine import AsyncEngine
    from peftkit_serve.engine import Engine

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0
"""How long running requests may go on after the first SIGTERM or Ctrl-C."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def command(
    base: Annotated[str, typer.Option(help="Base model: the embedded default's name, a folder, a .gguf file, a hub id.")],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="An adapter to serve; repeat it for more.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Serve the adapter in each sub-folder, by the folder's name.")
    ] = None,
    quant: Annotated[Literal["nf4", "none"], typer.Option(help="How the base's weights are held.")] = "none",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="A request's tokens don't depend on what else is in its batch.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Let everyone in who reaches an address that is not loopback.")
    ] = False,
) -> None:
    """Serve one base and its adapters with the OpenAI API. Prints one line when it is ready to answer."""
    named = [_named(spec) for spec in adapter or []]
    listener = bind(host, port, no_auth=no_auth)
    with listener:
        from peftkit_serve.async_engine import AsyncEngine
        from peftkit_serve.engine import Engine
        from peftkit_serve.http import create_app

        engine = Engine(base, quant=quant, deterministic=deterministic)
        ...
