"""`peftkit serve`: one base and its adapters over HTTP, until SIGTERM or Ctrl-C."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from peftkit import resources
from peftkit.cli import output
from peftkit.errors import InputError

if TYPE_CHECKING:
    from peftkit.base import BaseInfo
    from peftkit_serve import Engine


class _Sizes(NamedTuple):
    """What a step may hold, where no option says it."""

    requests: int
    tokens_per_step: int
    adapters: int


_CPU_SIZES, _GPU_SIZES = _Sizes(64, 512, 16), _Sizes(256, 2048, 256)


def command(
    base: Annotated[str, typer.Option(help="Base model: the embedded default, a folder, a .gguf file or a hub id.")],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="An adapter to serve; repeat it for more.")
    ] = None,
    adapters: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Serve the adapter in each sub-folder under the folder's name.")
    ] = None,
    quant: Annotated[Literal["nf4", "none"], typer.Option(help="How the base's weights are held.")] = "none",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Make a request's tokens independent of the rest of its batch.")
    ] = False,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a step; others wait.  [default: 256 on a GPU, else 64]")
    ] = None,
    max_tokens_per_step: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens in a step, prompts' too.  [default: 2048 on a GPU, else 512]"),
    ] = None,
    max_adapters: Annotated[
        int | None,
        typer.Option(
            min=1, help="LoRA and bottleneck adapters on the device at a time.  [default: 256 on a GPU, else 16]"
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Answers of all tenants that may wait for their first token; more are refused.")
    ] = 1024,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Answer everyone who reaches an address that is not loopback.")
    ] = False,
    db: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database of tenants, keys and adapters: sqlite:/// or postgresql://."),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where adapters that come over HTTP, and the database, are kept.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long running requests may go on after SIGTERM.")
    ] = 30.0,
    root: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="A folder whose adapters may be registered by path.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Send OpenTelemetry traces there; the standard OTEL_* variables hold as well."
        ),
    ] = None,
) -> None:
    """Serve one base and its adapters with the OpenAI API. Prints one line when it is ready to answer."""
    from peftkit_serve import EngineProcess

    engine = EngineProcess()  # which imports what it needs while this process does
    with ExitStack() as at_end:
        at_end.callback(engine.stop)
        named = [_named(spec) for spec in adapter or []]
        watched = None if adapters is None else _watched(adapters)

        from peftkit_serve.http import Settings, bind, create_app, is_loopback, serve, url_of, write_json_lines
        from peftkit_serve.http.access import Caller
        from peftkit_serve.http.tracing import open_provider
        from peftkit_serve.tenants.places import database_of, has_tenants, store_of

        database = database_of(db, store)
        listener = at_end.enter_context(bind(host, port, any_client=no_auth or has_tenants(database)))
        if tracer_provider := open_provider(otlp_traces_endpoint):
            at_end.callback(tracer_provider.shutdown)
        sizes = (max_requests, max_tokens_per_step, max_adapters)
        engine.make(partial(make_engine, base, quant, deterministic, sizes, named, debug=output.state.debug))
        served_name = name_of(engine.base)
        local = is_loopback(listener)
        settings = Settings(
            store=store_of(store),
            database=database,
            adapter_roots=tuple(root or ()) + (() if watched is None else (watched,)),
            watched=watched,
            max_waiting=max_queue,
            drain_timeout_s=drain_timeout,
            open_admin=local,
            require_key=not local and not no_auth,
        )
        app = create_app(engine, served_name=served_name, settings=settings, tracer_provider=tracer_provider)
        url = url_of(listener)
        write_json_lines()

        def ready() -> None:
            models = app.state.service.names(Caller())
            line = f"peftkit serves {', '.join(models)} at {url} (Ctrl-C stops it)"
            output.emit({"url": url, "models": models}, line)

        serve(app, listener, ready)


def make_engine(
    base: str,
    quant: Literal["nf4", "none"],
    deterministic: bool,
    sizes: tuple[int | None, int | None, int | None],
    adapters: list[tuple[str, Path]],
    *,
    debug: bool,
) -> "Engine":
    """The engine with the adapters that were named, made in its own process, whose log lines are as the server's.

    sizes: those of `_Sizes` that an option says.
    """
    from peftkit.base import auto_device
    from peftkit.cli.main import quiet_libraries
    from peftkit_serve import Engine
    from peftkit_serve.http import write_json_lines
    from peftkit_serve.tenants.fair_share import FairShare

    quiet_libraries(debug=debug)
    usual = _GPU_SIZES if auto_device("auto").type == "cuda" else _CPU_SIZES
    requests, tokens_per_step, places = (given or one for given, one in zip(sizes, usual, strict=True))
    engine = Engine(
        base,
        quant=quant,
        deterministic=deterministic,
        policy=FairShare(),
        max_requests=requests,
        max_tokens_per_step=tokens_per_step,
        max_adapters=places,
    )
    _add_named(engine, name_of(engine.base), adapters)
    write_json_lines()
    return engine


def name_of(base: "BaseInfo") -> str:
    """What `model` calls a base: its embedded name or hub id, else its folder's or file's own name."""
    path = Path(base.name)
    if not path.is_absolute():
        return base.name
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def _named(spec: str) -> tuple[str, Path]:
    """NAME=PATH, taken apart."""
    from peftkit.artifact import NAME

    name, _, path = spec.partition("=")
    if not path or not NAME.fullmatch(name):
        raise InputError(
            f"--adapter {spec}: must be NAME=PATH, the name of letters, digits, '.', '_' and '-'", field="adapter"
        )
    return name, resources.find(path)


def _watched(parent: Path) -> Path:
    """The folder of adapters as it will be watched."""
    found = resources.find(parent)
    if not found.is_dir():
        raise InputError(f"--adapters {parent}: no such folder", field="adapters")
    return found


def _add_named(engine: "Engine", served_name: str, adapters: list[tuple[str, Path]]) -> None:
    """Adds the adapters that were named; a bad one ends the command."""
    for name, path in adapters:
        try:
            _add(engine, served_name, name, path)
        except InputError as error:
            raise InputError(f"--adapter {name}={path}: {error}", field="adapter") from error


def _add(engine: "Engine", served_name: str, name: str, path: Path) -> None:
    if name == served_name:
        raise InputError(f"the base is called '{name}' already: give the adapter another name", field="name")
    engine.adapters.add(name, path)
