"""Checkpoints: resumption with the same bits, whatever ended the run, and what is refused."""

import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import peftkit.artifact.writer
import peftkit.train.loop
from peftkit.artifact import read_adapter
from peftkit.errors import InputError, RunError
from peftkit.recipe import Recipe
from peftkit.train import Interrupted, RunSummary, train

MakeRecipe = Callable[..., Recipe]

LORA = {"kind": "lora", "r": 4, "alpha": 8.0, "dropout": 0.2}
PROMPT = {"kind": "prompt", "num_virtual_tokens": 4}
METHODS: dict[str, Any] = {
    "lora": LORA,
    "rslora": {**LORA, "variant": "rslora"},
    "dora": {**LORA, "variant": "dora"},
    "lora+": {**LORA, "lr_ratio": 16.0},
    "pissa": {**LORA, "init": "pissa"},
    "loftq": {**LORA, "init": "loftq"},
    "modules_to_save": {**LORA, "targets": ["q_proj"], "modules_to_save": ["layers.1.mlp.up_proj"]},
    "token_rows": {**LORA, "trainable_token_indices": [3, 70]},
    "houlsby": {"kind": "bottleneck", "variant": "houlsby", "reduction_factor": 8},
    "pfeiffer": {"kind": "bottleneck", "variant": "pfeiffer", "reduction_factor": 8},
    "parallel": {"kind": "bottleneck", "variant": "parallel", "reduction_factor": 8},
    "prefix": {"kind": "prefix", "num_virtual_tokens": 4},
    "ptuning_v2": {"kind": "ptuning_v2", "num_virtual_tokens": 4},
    "ptuning-mlp": {"kind": "ptuning", "num_virtual_tokens": 4, "encoder": "mlp"},
    "ptuning-lstm": {"kind": "ptuning", "num_virtual_tokens": 4, "encoder": "lstm", "encoder_dropout": 0.1},
    "prompt": PROMPT,
    "lora with prompt": [LORA, PROMPT],
}
QUANTS = {"loftq": "nf4"}
DATA: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "packed": {"packing": True},
    "streamed": {"packing": True, "streaming": True},
}


@pytest.fixture(params=["lora", "prompt"])
def method_kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ten_steps(make_recipe: MakeRecipe, tmp_path: Path) -> Callable[..., Recipe]:
    """Ten steps over a little more than an epoch, with evaluations and uneven windows."""
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"prompt": "ab" * n, "completion": "b" * n}) + "\n" for n in range(1, 7)))

    def make(name: str, kind: str = "lora", **sections: Any) -> Recipe:
        sections["train"] = {
            "max_steps": 10, "batch_size": 2, "grad_accum": 2, "save_every": 2, **sections.get("train", {})
        }  # fmt: skip
        sections["data"] = {"valid": str(valid), **sections.get("data", {})}
        sections["eval"] = {"every": 3, **sections.get("eval", {})}
        content = make_recipe(out=str(tmp_path / name), **sections).model_dump()
        return Recipe.model_validate({**content, "method": METHODS[kind]})

    return make


class StopAt:
    """A progress display that presses Ctrl-C, or raises, at a step."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._left, self._act = step, act

    def __call__(self, description: str, *, total: int | None = None, unit: str = "it") -> "StopAt":
        return self

    def update(self, n: int = 1, **figures: float) -> None:
        self._left -= n
        if self._left == 0:
            self._act()

    def close(self) -> None:
        pass


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def crash() -> None:
    raise ZeroDivisionError


def stop_at(recipe: Recipe, step: int, *, resume: bool = False) -> None:
    with pytest.raises(Interrupted, match=f"interrupted at step {step} of 10; .*--resume goes on from it"):
        train(recipe, resume=resume, progress=StopAt(step, ctrl_c))


def steps_kept(recipe: Recipe) -> list[str]:
    return sorted(path.name for path in (Path(recipe.out) / "state").iterdir())


def same_run(one: RunSummary, other: RunSummary) -> None:
    """Same adapter bits, same curve."""
    files = adapter_files(one.out)
    assert len(files) >= 3 and files == adapter_files(other.out)
    assert (one.uid, one.best_step, one.best_loss) == (other.uid, other.best_step, other.best_loss)
    assert curve(one) == curve(other)


def adapter_files(out: Path) -> dict[str, bytes]:
    """The adapter's, the best's and the last's tensors by their place under `out`."""
    files = {str(file.relative_to(out)): file for file in sorted(out.rglob("adapter_model.safetensors"))}
    return {name: file.read_bytes() for name, file in files.items() if not name.startswith("state/")}


def curve(summary: RunSummary) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (summary.out / "metrics.jsonl").read_text().splitlines()]
    return [(line["event"], line["step"], line["loss"], line.get("lr"), line.get("tokens")) for line in lines]


# the same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [5, 6])  # 6: an evaluation is due at the checkpoint's step
def test_ten_steps_equal_five_ctrl_c_resume_five(ten_steps: Callable[..., Recipe], method_kind: str, step: int) -> None:
    whole = train(ten_steps("whole", method_kind))
    recipe = ten_steps("parts", method_kind)
    stop_at(recipe, step)
    assert steps_kept(recipe) == ["step-4", f"step-{step}"]
    assert not (Path(recipe.out) / "adapter_config.json").exists()
    torch.randn(11)  # another process would have other generators
    same_run(train(recipe, resume=True), whole)


def test_a_run_that_dies_between_checkpoints_goes_on_from_the_one_before(
    ten_steps: Callable[..., Recipe], method_kind: str
) -> None:
    whole = train(ten_steps("whole", method_kind))
    recipe = ten_steps("parts", method_kind)
    with pytest.raises(ZeroDivisionError):
        train(recipe, progress=StopAt(7, crash))
    assert steps_kept(recipe) == ["step-4", "step-6"]
    same_run(train(recipe, resume=True), whole)


def test_resuming_again_and_again_gives_the_same_bits(ten_steps: Callable[..., Recipe]) -> None:
    whole = train(ten_steps("whole"))
    recipe = ten_steps("parts")
    stop_at(recipe, 1)
    with pytest.raises(Interrupted, match="at step 3"):
        train(recipe, resume=True, progress=StopAt(2, ctrl_c))
    with pytest.raises(Interrupted, match="at step 9"):
        train(recipe, resume=True, progress=StopAt(6, ctrl_c))
    same_run(train(recipe, resume=True), whole)


def test_ctrl_c_during_an_evaluation_is_heeded_and_the_evaluation_made_up_for(
    ten_steps: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(ten_steps("whole"))
    recipe = ten_steps("parts")
    real = peftkit.train.loop.Trainer._mean_loss

    def interrupted(self: Any, *args: Any) -> float | None:
        ctrl_c()
        return real(self, *args)

    monkeypatch.setattr(peftkit.train.loop.Trainer, "_mean_loss", interrupted)
    with pytest.raises(Interrupted, match="at step 3"):
        train(recipe)
    monkeypatch.undo()
    same_run(train(recipe, resume=True), whole)


def test_more_steps_may_be_asked_for(ten_steps: Callable[..., Recipe]) -> None:
    constant = {"optim": {"schedule": "constant", "warmup": 0.0}}
    whole = train(ten_steps("whole", **constant))
    recipe = ten_steps("parts", **constant, train={"max_steps": 5})
    assert train(recipe).steps == 5
    more = train(ten_steps("parts", **constant), resume=True)
    assert more.steps == 10
    assert (more.out / "last" / "adapter_model.safetensors").read_bytes() == (
        whole.out / "last" / "adapter_model.safetensors"
    ).read_bytes()


def test_a_finished_run_resumed_trains_no_further(ten_steps: Callable[..., Recipe]) -> None:
    recipe = ten_steps("run")
    first = train(recipe)
    again = train(recipe, resume=True)
    same_run(again, first)
    assert again.tokens == first.tokens


def test_resume_without_a_checkpoint_begins_at_the_beginning_and_says_so(
    ten_steps: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(ten_steps("whole"))
    caplog.set_level(logging.INFO, "peftkit")
    same_run(train(ten_steps("parts"), resume=True), whole)
    assert "no checkpoint in" in caplog.text and "starting from the beginning" in caplog.text


def test_resume_never_replaces_an_adapter_that_has_no_checkpoint(ten_steps: Callable[..., Recipe]) -> None:
    recipe = ten_steps("run")
    first = train(recipe)
    shutil.rmtree(first.out / "state")
    before = (first.out / "adapter_model.safetensors").read_bytes()
    with pytest.raises(InputError, match="holds an adapter but no checkpoint: --overwrite trains anew"):
        train(recipe, resume=True)
    assert (first.out / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*((kind, "adamw") for kind in METHODS), ("lora", "adamw_8bit"), ("lora with prompt", "adamw_8bit")],
)
def test_every_kind_goes_on_with_the_same_bits(ten_steps: Callable[..., Recipe], kind: str, optimizer: str) -> None:
    sections = {"quant": {"kind": QUANTS.get(kind, "none")}, "optim": {"name": optimizer}, "eval": {"every": 6}}
    whole = train(ten_steps("whole", kind, **sections))
    recipe = ten_steps("parts", kind, **sections)
    stop_at(recipe, 5)
    torch.randn(11)
    same_run(train(recipe, resume=True), whole)


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_recomputed_activations_go_on_with_the_same_bits(ten_steps: Callable[..., Recipe], recompute: str) -> None:
    sections = {"train": {"gradient_checkpointing": recompute}, "eval": {"every": 6}}
    whole = train(ten_steps("whole", "dora", **sections))
    recipe = ten_steps("parts", "dora", **sections)
    stop_at(recipe, 5)
    torch.randn(11)
    same_run(train(recipe, resume=True), whole)


@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize("step", [3, 9])
def test_packed_and_streamed_rows_go_on_with_the_same_bits(
    ten_steps: Callable[..., Recipe], data: str, step: int
) -> None:
    whole = train(ten_steps("whole", data=DATA[data]))
    recipe = ten_steps("parts", data=DATA[data])
    stop_at(recipe, step)
    torch.randn(11)
    same_run(train(recipe, resume=True), whole)


# damage --------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize(
    "file",
    ["adapter.safetensors", "optimizer.safetensors", "state.json", "best/adapter_config.json", "manifest.json"],
)
def test_a_damaged_last_checkpoint_falls_back_to_the_one_before_and_says_so(
    ten_steps: Callable[..., Recipe],
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], None],
    reference: bytes,
) -> None:
    recipe = ten_steps("run", train={"max_steps": 10, "save_every": 2})
    stop_at(recipe, 5)
    damage(Path(recipe.out) / "state" / "step-5" / file)
    caplog.set_level(logging.INFO, "peftkit")
    summary = train(recipe, resume=True)
    assert "step-5 is damaged" in caplog.text and "going on from step 4" in caplog.text
    assert (summary.out / "adapter_model.safetensors").read_bytes() == reference
    assert steps_kept(recipe) == ["step-10", "step-8"]


@pytest.fixture
def reference(ten_steps: Callable[..., Recipe]) -> bytes:
    """The adapter of an uninterrupted run."""
    return (train(ten_steps("reference")).out / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", list(METHODS))
def test_every_kind_goes_on_from_the_checkpoint_before_one_cut_off_while_saving(
    ten_steps: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    sections = {"quant": {"kind": QUANTS.get(kind, "none")}, "eval": {"every": 6}}
    whole = train(ten_steps("whole", kind, **sections))
    recipe = ten_steps("parts", kind, **sections)
    real = os.replace

    def killed(source: Any, target: Any) -> None:
        if Path(target).name == "step-6":
            raise SystemExit  # the checkpoint is written and not yet renamed
        real(source, target)

    monkeypatch.setattr(peftkit.artifact.writer.os, "replace", killed)
    with pytest.raises(SystemExit):
        train(recipe)
    monkeypatch.undo()
    assert steps_kept(recipe) == ["step-2", "step-4"]
    truncate(Path(recipe.out) / "state" / "step-4" / "adapter.safetensors")
    caplog.set_level(logging.INFO, "peftkit")
    same_run(train(recipe, resume=True), whole)
    assert "step-4 is damaged" in caplog.text and "going on from step 2" in caplog.text


def test_the_best_is_the_one_of_the_way_that_was_gone(
    ten_steps: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was better than its checkpoint and then died is gone; what it called its best isn't the run's."""

    def evaluations(losses: list[float]) -> None:
        given = iter(losses)
        monkeypatch.setattr(peftkit.train.loop.Trainer, "_mean_loss", lambda *_: next(given))

    recipe = ten_steps("run", train={"save_every": 5})
    evaluations([2.0, 1.0])
    with pytest.raises(ZeroDivisionError):
        train(recipe, progress=StopAt(7, crash))  # after the evaluations at 3 and 6
    assert read_adapter(Path(recipe.out) / "best").record["step"] == 6
    evaluations([3.0, 3.0, 3.0])
    summary = train(recipe, resume=True)
    assert (summary.best_step, summary.best_loss) == (3, 2.0)
    assert read_adapter(summary.out).record["step"] == read_adapter(summary.out / "best").record["step"] == 3
    assert read_adapter(summary.out).uid == summary.uid


def test_what_was_called_best_after_the_checkpoint_is_gone(
    ten_steps: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([2.0, *[math.nan] * 4])
    monkeypatch.setattr(peftkit.train.loop.Trainer, "_mean_loss", lambda *_: next(given))
    recipe = ten_steps("run", train={"save_every": 2})
    with pytest.raises(ZeroDivisionError):
        train(recipe, progress=StopAt(4, crash))  # after the evaluation at 3, before the checkpoint of step 4
    with pytest.raises(RunError, match="the loss after the last step, 10, isn't finite: no adapter is exported"):
        train(recipe, resume=True)
    assert not (Path(recipe.out) / "best").exists()


def test_when_all_checkpoints_are_damaged_the_run_is_refused(ten_steps: Callable[..., Recipe]) -> None:
    recipe = ten_steps("run")
    stop_at(recipe, 5)
    for manifest in (Path(recipe.out) / "state").glob("*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(RunError, match="no checkpoint is whole: start anew with --overwrite"):
        train(recipe, resume=True)


def test_nothing_on_disk_is_pickled(ten_steps: Callable[..., Recipe]) -> None:
    recipe = ten_steps("run")
    train(recipe)
    files = [path for path in Path(recipe.out).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".html", ".json", ".jsonl", ".safetensors"}
    assert not any(part.startswith(".") for path in files for part in path.relative_to(recipe.out).parts)


# a changed recipe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"optim": {"lr": 0.1}}, r"optim\.lr is 0\.1 but the run began with 0\.005"),
        ({"train": {"seed": 3}}, r"train\.seed is 3 but the run began with 0"),
        ({"train": {"batch_size": 3}}, r"train\.batch_size is 3"),
        ({"train": {"max_steps": 8}}, r"train\.max_steps and train\.epochs now give 8 steps, the run began with 10"),
        ({"quant": {"kind": "nf4"}}, r"quant\.kind is 'nf4'"),
    ],
)
def test_resume_with_a_changed_recipe_names_the_field(
    ten_steps: Callable[..., Recipe], change: dict[str, Any], field: str
) -> None:
    stop_at(ten_steps("run"), 5)
    with pytest.raises(InputError, match=f"--resume: {field}"):
        train(ten_steps("run", **change), resume=True)


def test_resume_with_another_method_names_it(ten_steps: Callable[..., Recipe]) -> None:
    stop_at(ten_steps("run"), 5)
    with pytest.raises(InputError, match=r"--resume: method\.kind is 'prompt' but the run began with 'lora'"):
        train(ten_steps("run", "prompt"), resume=True)


def test_resume_on_changed_data_is_refused_and_moved_data_is_not(
    ten_steps: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = ten_steps("run")
    stop_at(recipe, 5)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((tmp_path / "train.jsonl").read_bytes())
    data = recipe.data.model_copy(update={"train": str(moved)})
    log = recipe.log.model_copy(update={"every": 2})
    with moved.open("a") as file:
        file.write('{"prompt": "a", "completion": "b"}\n')
    changed = recipe.model_copy(update={"data": data, "log": log})
    with pytest.raises(InputError, match=r"--resume: data\.train \S*moved\.jsonl is not what the run began"):
        train(changed, resume=True)
    moved.write_bytes((tmp_path / "train.jsonl").read_bytes())
    assert train(changed, resume=True).steps == 10


# no room -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_while_saving_is_one_line_and_the_checkpoint_before_is_whole(
    ten_steps: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, reference: bytes
) -> None:
    recipe = ten_steps("run")
    real, calls = os.fsync, iter(range(1, 1000))

    def full(descriptor: int) -> None:
        if "step-6" in os.readlink(f"/proc/self/fd/{descriptor}") and next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(peftkit.artifact.writer.os, "fsync", full)
    with pytest.raises(RunError, match="no room on the disk"):
        train(recipe)
    assert steps_kept(recipe) == ["step-2", "step-4"]
    monkeypatch.undo()
    summary = train(recipe, resume=True)
    assert (summary.out / "adapter_model.safetensors").read_bytes() == reference


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 150 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system isn't allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_leaves_nothing_half_written(
    ten_steps: Callable[..., Recipe], small_disk: Path
) -> None:
    recipe = ten_steps("run").model_copy(update={"out": str(small_disk / "run")})
    with pytest.raises(RunError, match=r"no room on the disk|No space left on device"):
        train(recipe)
    out = Path(recipe.out)
    assert not list(out.rglob(".*"))
    for path in (out / "state").glob("step-*"):
        assert {file.name for file in path.iterdir()} - {"best"} == {
            "adapter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
        }  # fmt: skip
    subprocess.run(["mount", "-o", "remount,size=2m", str(small_disk)], check=True)
    assert train(recipe, resume=True).steps == 10
