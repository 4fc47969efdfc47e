"""Every shipped recipe says the command that runs it, and that command trains."""

from pathlib import Path

import pytest
import yaml

from peftkit import resources
from peftkit.artifact import read_adapter
from peftkit.recipe import load_recipe
from peftkit.train import train

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_first_line_is_the_command_that_runs_it(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# peftkit train recipes/{path.name}"
    assert resources.find(f"recipes/{path.name}").exists()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_trains_and_its_adapter_is_read_back(path: Path, tiny_base: Path, tmp_path: Path) -> None:
    fits = [f"base={tiny_base}", "quant.kind=none", "data.max_length=230", "data.valid=null", f"out={tmp_path / 'run'}"]
    rows = tmp_path / "rows.jsonl"
    data = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["train"]
    lines = [line for line in resources.find(data).read_text(encoding="utf-8").splitlines() if len(line) < 180]
    rows.write_text("\n".join(lines[:40]), encoding="utf-8")
    recipe = load_recipe(path, [*fits, f"data.train={rows}", "train.max_steps=2", "train.batch_size=2"])
    summary = train(recipe)
    assert summary.steps == 2
    assert read_adapter(summary.out).config.kind == recipe.method.kind


def test_recipes_hold_nothing_but_recipes() -> None:
    assert RECIPES
    assert {path.suffix for path in RECIPES[0].parent.iterdir()} == {".yaml"}
