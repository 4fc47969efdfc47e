"""The page of a run, and of several side by side."""

import json
import math
import platform
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import transformers

import peftkit.train.loop
from peftkit.cli.main import run
from peftkit.errors import InputError
from peftkit.recipe import Recipe
from peftkit.train import train
from peftkit.train.report import read_run, write_report

MakeRecipe = Callable[..., Recipe]


class Reader(HTMLParser):
    """Collects tags, what is loaded from elsewhere, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_run_ends_with_a_page_of_its_own(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    valid = tmp_path / "valid.jsonl"
    valid.write_text('{"prompt": "<script>ab", "completion": " & <b>"}\n{"prompt": "x", "completion": "y"}\n')
    recipe = make_recipe(data={"valid": str(valid)}, eval={"every": 2}, log={"samples": 2})
    summary = train(recipe)
    content = json.loads((summary.out / "run.json").read_text())
    assert [sample["reference"] for sample in content["samples"]] == [" & <b>", "y"]
    assert all(isinstance(sample[name], str) for sample in content["samples"] for name in ("prompt", "before", "after"))
    page = (summary.out / "report.html").read_text()
    read = Reader(page)
    assert "script" not in read.tags and "b" not in read.tags and not read.links
    assert "url(" not in page and "@import" not in page
    shown = ("<script>ab", " & <b>", "optim.schedule", "cosine", summary.uid, "evaluation loss")
    environment = ("transformers", transformers.__version__, platform.platform(), "threads", "cpu")
    for text in (*shown, *environment):
        assert text in read.text, text
    assert read.tags.count("polyline") == len(["loss", "eval loss", "lr", "grad_norm", "tokens_per_s", "memory_gb"])


def test_a_curve_passes_through_the_figures_of_the_metrics(make_recipe: MakeRecipe) -> None:
    summary = train(make_recipe())
    losses = [value for _, value in read_run(summary.out).points("train", "loss")]
    page = (summary.out / "report.html").read_text()
    first = re.search(r"training loss</figcaption>.*?points='([^']*)'", page, re.S)
    assert first is not None
    heights = [float(point.split(",")[1]) for point in first[1].split()]
    assert len(heights) == len(losses) == 6
    lowest, highest = losses.index(min(losses)), losses.index(max(losses))
    assert heights.index(max(heights)) == lowest and heights.index(min(heights)) == highest


def test_several_runs_are_compared_in_one_page(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        train(make_recipe(train={"seed": seed}, out=str(tmp_path / f"run{seed}")))
    out = tmp_path / "pages" / "both.html"
    capsys.readouterr()
    assert run(["report", str(tmp_path / "run1"), str(tmp_path / "run2"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(out)
    read = Reader(out.read_text())
    assert "run1" in read.text and "run2" in read.text
    assert re.search(r"<tr class='differs'><th>train.seed</th>", out.read_text())
    assert re.search(r"<tr><th>optim.lr</th>", out.read_text())
    assert read.tags.count("polyline") == 2 * 5


def test_figures_that_are_not_finite_are_null_in_every_file_and_no_point_of_a_curve(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([3.0, math.nan, math.inf])
    monkeypatch.setattr(peftkit.train.loop.Trainer, "_mean_loss", lambda *_: next(given))
    valid = tmp_path / "valid.jsonl"
    valid.write_text('{"prompt": "ab", "completion": "b"}\n')
    summary = train(make_recipe(data={"valid": str(valid)}, eval={"every": 2}))
    assert (summary.best_loss, summary.eval_loss) == (3.0, None)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for path in summary.out.rglob("*.json*"):
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=refuse)
    assert read_run(summary.out).points("eval", "loss") == [(2, 3.0)]
    with (summary.out / "metrics.jsonl").open("a") as file:  # as another program may write it
        file.write('{"event": "eval", "step": 7, "loss": NaN}\n')
    assert read_run(summary.out).points("eval", "loss") == [(2, 3.0)]


def test_a_metric_of_answers_has_a_curve(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    valid = tmp_path / "valid.jsonl"
    valid.write_text('{"prompt": "ab", "completion": "b"}\n')
    summary = train(make_recipe(data={"valid": str(valid)}, eval={"every": 2, "metric": "rouge_l"}))
    assert "evaluation rouge_l" in Reader((summary.out / "report.html").read_text()).text


@pytest.mark.parametrize("content", [None, "{", "[]", '{"status": 3}\n'])
def test_a_folder_that_holds_no_run_is_bad_input(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
        (tmp_path / "metrics.jsonl").write_text("3\n")
    with pytest.raises(InputError, match=r"holds no run|is damaged"):
        write_report([tmp_path], tmp_path / "report.html")
    assert run(["report", str(tmp_path)]) == 2
