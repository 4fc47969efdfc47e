"""`peftkit train` from the outside: exit codes, one result on stdout, one line an error."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from peftkit.artifact import read_adapter
from peftkit.cli.main import run
from peftkit.errors import RunError
from peftkit.recipe import Recipe
from peftkit.train.folder import check_room

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_recipe().model_dump(mode="json", exclude_unset=True)))
    return str(path)


def answer(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["train", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_ends_with_its_figures_and_the_adapters_folder(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, err = answer(capsys, recipe, "optim.lr=1e-3", "train.max_steps=3")
    assert code == 0, err
    assert out.splitlines()[0].startswith("3 steps in ")
    assert out.splitlines()[-1] == f"adapter (last) in {tmp_path / 'run'}"
    assert "fast path" not in out  # which a CPU doesn't have
    assert "train: 3/3 step" in err and "tokens_per_s" in err
    record = read_adapter(tmp_path / "run").record
    assert record["recipe"]["optim"]["lr"] == 1e-3


def test_a_run_with_nothing_on_the_fast_path_says_so(
    recipe: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit.train.run.fast_share", lambda *_: 0.0)
    code, out, err = answer(capsys, recipe, "train.max_steps=1")
    assert code == 0, err
    assert "0.0% of the model's layers on the fast path" in out.splitlines()


def test_a_run_is_deployed_under_its_own_name_with_nothing_but_the_adapter(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    served = tmp_path / "served"
    for lr in ("1e-3", "2e-3"):  # a second run takes the place of the first
        options = (f"optim.lr={lr}", "train.max_steps=2", "--overwrite", "--deploy", str(served))
        code, _, err = answer(capsys, recipe, *options)
        assert code == 0 and f"deployed to {served / 'run'}" in err
        assert read_adapter(served / "run").uid == read_adapter(tmp_path / "run").uid
    files = {path.name for path in (served / "run").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "peftkit.json"}
    assert [path.name for path in served.iterdir()] == ["run"]
    code, _, err = answer(capsys, recipe, f"out={tmp_path / 'no name'}", "--deploy", str(served))
    assert code == 2 and "--deploy" in err and not (tmp_path / "no name").exists()


def test_json_is_one_object_on_stdout(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    code, out, _ = answer(capsys, recipe, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["out"] == str(tmp_path / "run")
    assert summary["steps"] == summary["total_steps"] == 6
    assert summary["uid"] == read_adapter(tmp_path / "run").uid


def test_a_dry_run_shows_parameters_memory_and_a_sample_with_its_loss_mask(
    recipe: str, tmp_path: Path, capsys: Capture
) -> None:
    code, out, _ = answer(capsys, recipe, "--dry-run")
    assert code == 0
    assert "trainable 8,192" in out
    for part in ("weights", "adapter", "optimizer", "activations", "logits", "total"):
        assert f"\n  {part} " in out
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert out.rstrip("\n").endswith(f"{row['prompt']}[[{row['completion']}<|im_end|>]]")
    assert not (tmp_path / "run").exists()
    code, out, _ = answer(capsys, recipe, "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["trainable_parameters"] == 8192
    assert plan["sample"][1] == {"text": f"{row['completion']}<|im_end|>", "trained": True}
    assert sum(plan["memory"].values()) == plan["memory_total"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lrr=1"], "override 'optim.lrr=1': unknown key; did you mean 'optim.lr'?"),
        (["base=nowhere/base"], "nowhere/base"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl: there is no such data file: name a file"),
        (["method.targets=[q_prj]"], "method.targets: 'q_prj' matches no module of this model; did you mean 'q_proj'?"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_or_two_lines(
    recipe: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = answer(capsys, recipe, *overrides)
    assert (code, out) == (2, ""), err
    lines = [line for line in err.splitlines() if line and "Loading weights" not in line]
    assert len(lines) <= 2 and lines[0].startswith("peftkit: ") and message in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "completion"', ":25: broken JSON at column 29"),
        ('{"prompt": "a", "completion": ""}', ":25: completion is empty"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(
    recipe: str, tmp_path: Path, capsys: Capture, line: str, message: str
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(line)
    code, _, err = answer(capsys, recipe)
    assert code == 2
    assert err.startswith(f"peftkit: {tmp_path / 'train.jsonl'}{message}")


def test_a_missing_recipe_is_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    code, _, err = answer(capsys, str(tmp_path / "nowhere.yaml"))
    assert code == 2
    assert "nowhere.yaml: there is no such recipe" in err


def test_a_key_with_dashes_in_front_is_told_of_its_way(recipe: str, capsys: Capture) -> None:
    code, _, err = answer(capsys, recipe, "--optim.lr=1e-3")
    assert code == 2 and "A recipe's key has no dashes in front: optim.lr=VALUE." in err


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (
            ["out=FILE/sub"],
            2,
            "peftkit: out: FILE/sub can't be a folder, for FILE is a file: put it elsewhere with out=",
        ),
        (["out=FILE"], 2, "peftkit: out: FILE is a file, not a folder"),
        (["out=FILE.link/sub"], 2, "peftkit: out: FILE.link is a link to gone, which isn't there: put it elsewhere"),
        (["out=/proc/peftkit/run"], 1, "peftkit: out: can't write /proc/peftkit/run: "),
        (["--deploy", "FILE/sub"], 2, "peftkit: --deploy: FILE/sub can't be a folder, for FILE is a file"),
        (["--deploy", "/proc/peftkit"], 1, "peftkit: --deploy: can't write /proc/peftkit: "),
    ],
)
def test_where_nothing_can_be_written_is_known_before_the_base_is_loaded(
    recipe: str, tmp_path: Path, capsys: Capture, given: list[str], code: int, message: str
) -> None:
    (file := tmp_path / "file").touch()
    (tmp_path / "file.link").symlink_to("gone")
    argv = [word.replace("FILE", str(file)) for word in given]
    found, _, err = answer(capsys, recipe, "base=nowhere/at-all", *argv)
    assert (found, err[: len(message) + 500].startswith(message.replace("FILE", str(file)))) == (code, True), err


def test_a_disk_without_room_is_known_before_the_base_is_loaded(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # a file can't grow beyond it, as on a full disk
    try:
        code, _, err = answer(capsys, recipe, "base=nowhere/at-all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and f"out: can't write {tmp_path / 'run'}: File too large: put it elsewhere with out=" in err
    assert not list(tmp_path.glob(".*"))


def test_a_run_for_which_the_disk_has_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"out: the run's checkpoints and adapters take .* GB and .* has room for .* GB"):
        check_room(tmp_path / "run", 2**62, overwrite=False)
    check_room(tmp_path / "run", 1, overwrite=False)


def test_a_second_run_is_refused_then_overwritten(recipe: str, capsys: Capture) -> None:
    assert answer(capsys, recipe)[0] == 0
    code, _, err = answer(capsys, recipe)
    assert code == 2 and "already holds a run" in err
    assert answer(capsys, recipe, "--overwrite")[0] == 0


def test_a_full_disk_is_exit_code_1(recipe: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("peftkit.artifact.writer.os.fsync", full)
    code, out, err = answer(capsys, recipe)
    assert (code, out) == (1, "")
    assert "no room on the disk" in err.splitlines()[-1]


def test_ctrl_c_leaves_a_checkpoint_exits_130_and_resume_finishes(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    command = [sys.executable, "-m", "peftkit.cli.main", "train", recipe, "train.max_steps=150"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    (checkpoint,) = (tmp_path / "run" / "state").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert f"interrupted at step {step} of 150" in err
    code, out, err = answer(capsys, recipe, f"train.max_steps={step + 1}", "--resume")
    assert code == 2 and "they may only grow" in err
    code, out, err = answer(capsys, recipe, "train.max_steps=150", "--resume")
    assert code == 0 and out.startswith("150 steps in ")
    assert f"train from step {step}: {150 - step}/{150 - step} step" in err


def test_a_list_of_runs_is_planned_and_trained_on_one_base(
    recipe: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the report goes
    content = yaml.safe_load(Path(recipe).read_text())
    content = {key: value for key, value in content.items() if key not in ("out", "method")} | {
        "turn_steps": 1,
        "runs": [
            {"out": str(tmp_path / "a"), "method": {"kind": "lora", "r": 2}},
            {"out": str(tmp_path / "b"), "method": {"kind": "prompt", "num_virtual_tokens": 2}},
        ],
    }
    path = tmp_path / "runs.yaml"
    path.write_text(yaml.safe_dump(content))
    code, out, _ = answer(capsys, str(path), "train.max_steps=2", "--dry-run", "--json")
    assert code == 0
    assert [plan["steps"] for plan in json.loads(out)["runs"]] == [2, 2]
    assert not (tmp_path / "a").exists()
    code, out, err = answer(capsys, str(path), "train.max_steps=2", "--json")
    assert code == 0
    lines = [line for line in err.splitlines() if "step" in line]
    assert lines and all(line.startswith((f"{tmp_path / 'a'}: ", f"{tmp_path / 'b'}: ")) for line in lines)
    code, out, _ = answer(capsys, str(path), "train.max_steps=2", "--resume")
    assert code == 0 and [line.partition(": 2 steps in")[0] for line in out.splitlines() if " steps in " in line] == [
        str(tmp_path / name) for name in "ab"
    ]
    code, out, _ = answer(capsys, str(path), "train.max_steps=2", "--json", "--overwrite")
    assert [run["out"] for run in json.loads(out)["runs"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [read_adapter(tmp_path / name).parts[0].config.kind for name in "ab"] == ["lora", "prompt"]
    capsys.readouterr()
    assert run(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert (tmp_path / "report.html").exists()
    assert run(["report", str(tmp_path / "a"), "--out", str(tmp_path)]) == 2
    assert f"--out: {tmp_path} is a folder: name the page" in capsys.readouterr().err
    assert run(["report", str(tmp_path / "a"), "--out", f"{path}/page.html"]) == 2
    assert f"--out: {path} can't be a folder, for {path} is a file" in capsys.readouterr().err
