"""The `peftkit` command line: finds a command's module when it is called, and turns errors into lines and exit codes.

Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted.

A command is a module `peftkit.cli.NAME` with a function `command` whose parameters are typer options, or with a
`typer.Typer` named `app` for a group of commands; its row in `COMMANDS` is all that `peftkit --help` needs, so nothing
heavy is imported for it. `--json` and `--debug` are added to every command here.
"""

import importlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from peftkit.cli import output
from peftkit.errors import PeftkitError

COMMANDS: dict[str, str] = {
    "demo": "Fine-tune, evaluate, serve, merge and export on the embedded base, on a CPU in minutes.",
    "train": "Fine-tune by recipe.",
    "report": "One HTML page that shows or compares runs.",
    "eval": "Score an adapter, or the bare base, on a data file.",
    "generate": "One answer, streamed to the terminal.",
    "merge": "Merge adapters into a base and write a plain model, with proof.",
    "export": "Write an adapter in another program's format.",
    "serve": "The multi-tenant server.",
    "adapters": "A folder of adapters: list, show, add, remove, verify, diff.",
    "data": "Training data: check what would be trained.",
    "tenants": "Tenants of a server, their keys and limits.",
    "base": "Base models that can be named: list, info, fetch.",
    "bench": "Benchmarks beside peers and floors: one JSON line a case, then a table.",
    "doctor": "What this machine can do, and how to mend what it can't.",
}
"""Name of each command → its line in `peftkit --help`."""

# typer carries its own click since 0.26: the class above all usage errors is reached from the one public name of both
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def _json(value: bool) -> None:
    if value:
        output.state.start_json()


def _debug(value: bool) -> None:
    if value:
        output.state.debug = True


def _version(value: bool) -> None:
    if value:
        print(version("peftkit"))
        raise typer.Exit


def _shared(
    json: bool = typer.Option(
        False, "--json", help="Print one JSON object on stdout.", callback=_json, is_eager=True, expose_value=False
    ),
    debug: bool = typer.Option(
        False, "--debug", help="Show tracebacks and warnings.", callback=_debug, is_eager=True, expose_value=False
    ),
) -> None:
    """The options that every command has."""


def _add_shared(command: Any) -> Any:
    """Appends the shared options to a command, or to all commands of a group. Returns it."""
    for sub in getattr(command, "commands", {}).values():
        _add_shared(sub)
    template = typer.Typer(add_completion=False)
    template.command()(_shared)
    command.params.extend(typer.main.get_command(template).params)
    return command


def _load(name: str) -> Any:
    """The real command or group `name`, imported now."""
    module = importlib.import_module(f"peftkit.cli.{name}")
    group: typer.Typer | None = getattr(module, "app", None)
    if group is not None:
        group.rich_markup_mode = None
        return _add_shared(typer.main.get_group(group))
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(module.command)
    return _add_shared(typer.main.get_command(single))


class _LazyGroup(TyperGroup):
    """Lists commands from `COMMANDS` alone and imports the one that is called."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, line in COMMANDS.items():
            self.add_command(TyperCommand(name, help=line), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder if name is None else _load(name), rest


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    show_version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True, expose_value=False
    ),
) -> None:
    """Fine-tune a frozen language model with small adapters and serve many of them at once."""


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; errors become lines on stderr."""
    output.state.reset()
    with warnings.catch_warnings():
        quiet_libraries(debug="--debug" in argv)
        try:
            command = _add_shared(typer.main.get_command(app))
            code = command.main(list(argv), prog_name="peftkit", standalone_mode=False)
            # typer answers the code of typer.Exit; a command that simply ends answers what its function returned
            return code if isinstance(code, int) else 0
        except (Exception, KeyboardInterrupt) as error:  # the outermost edge: whatever it is, a user gets a line
            return _report(error, argv)
        finally:
            output.state.reset()


def main() -> NoReturn:
    """Entry point of the `peftkit` program."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    sys.exit(run(sys.argv[1:]))


def _report(error: BaseException, argv: Sequence[str]) -> int:
    """Prints an error as one or two lines on stderr, and as an object on stdout under `--json`."""
    if type(error).__name__ == "NoArgsIsHelpError":
        output.note(str(error))
        return 2
    code = getattr(error, "exit_code", 1)
    if isinstance(error, PeftkitError):
        message = str(error)
    elif isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", 130
    elif isinstance(error, _ClickException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "peftkit"
        fault = error.format_message()  # type: ignore[attr-defined]
        option = getattr(error, "option_name", None) or ""
        if "." in option and path.endswith(" train"):
            fault += f" A recipe's key has no dashes in front: {option.lstrip('-')}=VALUE."
        message = f"{fault}\nTry '{path} --help'."
    else:
        first = next(iter(str(error).splitlines()), "")
        message = f"{type(error).__name__}: {first} (--debug shows where)"
    if output.state.debug or "--debug" in argv:  # the flags are not read yet when reading them fails
        traceback.print_exception(error)
    output.note(f"peftkit: {message}")
    if "--json" in argv:
        output.state.start_json()
    if output.state.json and not output.state.emitted:
        field = getattr(error, "field", None)
        output.emit({"error": {"type": type(error).__name__, "message": message, "field": field, "code": code}}, "")
    return code


def quiet_libraries(*, debug: bool) -> None:
    """Keeps other libraries' banners, bars and advice off the terminal; set before they are imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost five times the CPU when cores are busy
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.basicConfig(
        handlers=[_NoteHandler()], level=logging.WARNING if debug else logging.ERROR, format="%(message)s"
    )
    for name in ("peftkit", "peftkit_serve", "peftkit_kernels"):
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a log file wants lines: ours are in `output`
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"peftkit")
    warnings.showwarning = _show_warning


class _NoteHandler(logging.Handler):
    """Log records as lines on stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        output.note(prefix + self.format(record))


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    output.note(f"warning: {message}")


if __name__ == "__main__":
    main()
