"""The command line's frame: instant help, one JSON object, exit codes, errors as lines."""

import io
import json
import logging
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from peftkit.cli import main, output
from peftkit.errors import AdapterError, RecipeError, RunError


@pytest.fixture
def install(monkeypatch) -> Callable[[Callable[..., None]], None]:
    """Puts a function in the place of the `doctor` command."""

    def put(function: Callable[..., None]) -> None:
        module = types.ModuleType("peftkit.cli.doctor")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "peftkit.cli.doctor", module)

    return put


def raiser(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


class TestHelp:
    def test_help_imports_nothing_heavy(self):
        program = (
            "import sys; from peftkit.cli.main import run; code = run(['--help']);"
            "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'fastapi'} & set(sys.modules);"
            "sys.exit(code or (f'imported {heavy}' if heavy else 0))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for name in main.COMMANDS:
            assert name in done.stdout

    @pytest.mark.parametrize("name", sorted(main.COMMANDS))
    def test_every_command_in_the_list_is_there_and_has_the_shared_options(self, name, capsys):
        assert main.run([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert "--json" in text and "--debug" in text and "-h, --help" in text

    def test_no_arguments_show_the_help_and_exit_with_2(self, capsys):
        assert main.run([]) == 2
        assert "Commands:" in capsys.readouterr().err

    @pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
    def test_it_runs_where_its_streams_are_closed(self, closed):
        program = f"exec {sys.executable} -m peftkit.cli.main --version {closed}"
        assert subprocess.run(["sh", "-c", program], check=False).returncode == 0

    def test_the_version_is_the_packages(self, capsys):
        assert main.run(["--version"]) == 0
        assert capsys.readouterr().out.strip().count(".") == 2


class TestUsageErrors:
    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["trian"], "Did you mean 'train'"),
            (["--nope"], "--nope"),
            (["base", "fetch"], "NAME"),
            (["base", "info", "a", "b"], "b"),
            (["base", "lst"], "Did you mean 'list'"),
            (["base"], "Missing command"),
        ],
    )
    def test_they_are_two_lines_and_exit_code_2(self, argv, said, capsys):
        assert main.run(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert said in printed.err and "--help'" in printed.err
        assert len(printed.err.strip().splitlines()) == 2


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "code"),
        [(RecipeError("r.yaml: no such key"), 2), (AdapterError("a: damaged"), 2), (RunError("disk full"), 1)],
    )
    def test_an_error_of_ours_is_its_message_and_its_exit_code(self, install, capsys, error, code):
        install(raiser(error))
        assert main.run(["doctor"]) == code
        printed = capsys.readouterr()
        assert printed.err == f"peftkit: {error}\n" and printed.out == ""

    def test_any_other_error_is_one_line_and_exit_code_1(self, install, capsys):
        install(raiser(ZeroDivisionError("a\nb")))
        assert main.run(["doctor"]) == 1
        assert capsys.readouterr().err == "peftkit: ZeroDivisionError: a (--debug shows where)\n"

    @pytest.mark.parametrize("argv", [["doctor", "--debug"], ["--debug", "doctor"]])
    def test_debug_shows_the_traceback(self, install, capsys, argv):
        install(raiser(RunError("disk full")))
        assert main.run(argv) == 1
        assert "Traceback" in capsys.readouterr().err

    def test_an_interrupt_is_exit_code_130(self, install):
        install(raiser(KeyboardInterrupt()))
        assert main.run(["doctor"]) == 130

    def test_a_command_chooses_its_exit_code(self, install):
        install(raiser(typer.Exit(1)))
        assert main.run(["doctor"]) == 1

    @pytest.mark.parametrize("argv", [["doctor", "--json"], ["--json", "doctor"]])
    def test_under_json_an_error_is_an_object_too(self, install, capsys, argv):
        install(raiser(RecipeError("r.yaml: no such key", field="optim.lr")))
        assert main.run(argv) == 2
        printed = capsys.readouterr()
        assert json.loads(printed.out) == {
            "error": {"type": "RecipeError", "message": "r.yaml: no such key", "field": "optim.lr", "code": 2}
        }
        assert printed.err == "peftkit: r.yaml: no such key\n"

    def test_under_json_a_usage_error_is_an_object_too(self, capsys):
        assert main.run(["base", "--json", "--nope"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == 2


class TestOutput:
    def test_json_is_exactly_one_object_whatever_is_printed_beside(self, install, capsys):
        def command() -> None:
            print("a library's banner")
            output.stream("partial text")
            output.note("reading")
            with output.progress("work", total=2, unit="step") as bar:
                bar.update(2, loss=1.5)
            output.emit({"path": Path("a/b"), "loss": float("nan"), "n": 3, "name": "ü"}, "text")

        install(command)
        assert main.run(["doctor", "--json"]) == 0
        printed = capsys.readouterr()
        assert printed.out.count("\n") == 1
        assert json.loads(printed.out) == {"path": "a/b", "loss": None, "n": 3, "name": "ü"}
        assert "a library's banner" in printed.err and "reading" in printed.err
        assert "partial text" not in printed.err

    def test_without_json_the_text_is_printed_and_made_only_then(self, install, capsys):
        install(lambda: output.emit({"a": 1}, lambda: "a is 1"))
        assert main.run(["doctor"]) == 0
        assert capsys.readouterr().out == "a is 1\n"

    def test_flags_of_one_run_do_not_reach_the_next(self, install, capsys):
        install(lambda: output.emit({"a": 1}, "text"))
        assert main.run(["doctor", "--json"]) == 0
        assert main.run(["doctor"]) == 0
        assert capsys.readouterr().out == '{"a": 1}\ntext\n'
        assert not output.state.json and output.state.stdout is None

    def test_dataclasses_become_mappings(self, install, capsys):
        @dataclass(frozen=True)
        class Point:
            x: int
            where: Path

        install(lambda: output.emit({"points": [Point(1, Path("p"))]}, ""))
        main.run(["doctor", "--json"])
        assert json.loads(capsys.readouterr().out) == {"points": [{"x": 1, "where": "p"}]}

    def test_off_a_terminal_progress_is_plain_lines(self, capsys, monkeypatch):
        now = iter(range(0, 1000, 10))
        monkeypatch.setattr(output.time, "monotonic", lambda: float(next(now)))
        with output.progress("train", total=4, unit="step") as bar:
            bar.update(1, loss=2.5)
        first, last = capsys.readouterr().err.splitlines()
        assert first.startswith("train: 1/4 step, 0.05 step/s, 60 s left, loss 2.5")
        assert last.startswith("train: 1/4 step")

    def test_on_a_terminal_progress_is_a_bar(self, monkeypatch):
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with output.progress("train", total=2, unit="step") as bar:
            bar.update(2, loss=2.5)
        assert "train" in terminal.getvalue() and "step/s" in terminal.getvalue()

    def test_a_table_lines_up(self):
        text = output.table(["name", "loss"], [["a", 0.123456], ["long", None]])
        assert text.splitlines() == ["name    loss", "----  ------", "a     0.1235", "long       –"]


class TestQuietness:
    def test_our_warnings_are_lines_and_those_of_libraries_are_silent(self, install, capsys):
        def command() -> None:
            warnings.warn_explicit("look here", UserWarning, "x.py", 1, module="peftkit.artifact")
            warnings.warn_explicit("noise", DeprecationWarning, "y.py", 1, module="transformers.models")

        install(command)
        assert main.run(["doctor"]) == 0
        assert capsys.readouterr().err == "warning: look here\n"

    def test_our_log_lines_go_to_stderr_and_those_of_libraries_nowhere(self):
        program = (
            "import logging, sys, types; from peftkit.cli.main import run\n"
            "def command() -> None:\n"
            "    logging.getLogger('peftkit.base').info('converting')\n"
            "    logging.getLogger('transformers').warning('advice')\n"
            "module = types.ModuleType('peftkit.cli.doctor'); module.command = command\n"
            "sys.modules[module.__name__] = module\n"
            "sys.exit(run(['doctor']))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "converting\n")

    def test_a_run_leaves_the_callers_warning_filters_alone(self, install):
        install(lambda: None)
        before = list(warnings.filters)
        main.run(["doctor"])
        assert warnings.filters == before
        assert logging.getLogger("peftkit").level in (logging.INFO, logging.DEBUG)
