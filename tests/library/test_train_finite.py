"""Steps whose loss or gradient isn't finite: skipped, counted, and where they are too many an error."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import peftkit.train.loop
from peftkit.artifact import read_adapter
from peftkit.errors import RunError
from peftkit.recipe import Recipe
from peftkit.train import train

MakeRecipe = Callable[..., Recipe]


def poison(monkeypatch: pytest.MonkeyPatch, bad_steps: set[int], factor: float) -> None:
    """Multiplies the losses of some steps (from 1) by `factor`."""
    real, calls = peftkit.train.loop.token_loss_sum, iter(range(1, 1000))
    monkeypatch.setattr(
        peftkit.train.loop,
        "token_loss_sum",
        lambda *args: real(*args) * (factor if next(calls) in bad_steps else 1.0),
    )


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e38])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float
) -> None:
    poison(monkeypatch, {2, 4}, factor)
    caplog.set_level(logging.WARNING, "peftkit")
    summary = train(make_recipe())
    assert (summary.steps, summary.skipped_steps) == (6, 2)
    assert all(tensor.isfinite().all() for tensor in read_adapter(summary.out).tensors.values())
    lines = [json.loads(line) for line in (summary.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 1, 1, 2, 2, 2]
    assert "step 2 skipped" in caplog.text


def test_five_steps_in_a_row_that_are_not_finite_end_the_run(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1, 2, 3, 4, 6, 7, 8, 9, 10}, math.nan)
    recipe = make_recipe(train={"max_steps": 20})
    with pytest.raises(RunError, match=r"5 steps in a row, up to step 10, .* lower optim.lr"):
        train(recipe)
    assert not (Path(recipe.out) / "adapter_config.json").exists()
    assert json.loads((Path(recipe.out) / "run.json").read_text())["status"] == "unfinished"


def test_a_step_that_is_skipped_at_the_end_leaves_an_adapter_that_is_good(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {6}, math.nan)
    summary = train(make_recipe())
    assert (summary.steps, summary.skipped_steps, summary.exported) == (6, 1, "last")


def test_a_run_of_mostly_skipped_steps_fails_and_keeps_what_was_saved(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, {2, 4, 5, 6}, math.nan)
    recipe = make_recipe(train={"save_every": 1})
    with pytest.raises(RunError, match=r"4 of 6 steps were skipped, .*no adapter is exported.*lower optim\.lr"):
        train(recipe)
    out = Path(recipe.out)
    assert not (out / "adapter_config.json").exists() and not (out / "report.html").exists()
    assert sorted(path.name for path in (out / "state").iterdir()) == ["step-4", "step-5"]


@pytest.mark.parametrize("held_out", [False, True])
def test_a_last_step_that_ruins_the_adapter_fails_the_run(
    make_recipe: MakeRecipe, tmp_path: Path, held_out: bool
) -> None:
    (rows := tmp_path / "valid.jsonl").write_text(json.dumps({"prompt": "a held-out row", "completion": " b"}))
    valid = str(rows) if held_out else None
    recipe = make_recipe(train={"max_steps": 1}, optim={"lr": 1e30}, data={"valid": valid})
    with pytest.raises(RunError, match=r"the loss after the last step, 1, isn't finite: no adapter is exported"):
        train(recipe)
    assert not (Path(recipe.out) / "adapter_config.json").exists()


def test_gradients_that_are_all_zero_end_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, set(range(100)), 0.0)
    with pytest.raises(RunError, match="the lora adapter's gradients are all zero"):
        train(make_recipe())
