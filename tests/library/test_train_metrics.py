"""Choosing the best by generated answers, and what a step has to fit into."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftkit.artifact import read_adapter
from peftkit.base import load_base
from peftkit.errors import RecipeError, RunError
from peftkit.evaluate import Example, read_examples, score
from peftkit.methods import attach
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
from peftkit.train.generate import generate_answers

MakeRecipe = Callable[..., Recipe]


def write_valid(tmp_path: Path) -> Path:
    path = tmp_path / "valid.jsonl"
    rows = [{"prompt": "ab" * n, "completion": " " + "b" * n} for n in range(1, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("metric", ["exact_match", "accuracy", "rouge_l"])
def test_the_best_is_the_one_whose_answers_score_best(make_recipe: MakeRecipe, tmp_path: Path, metric: str) -> None:
    valid = tmp_path / "valid.jsonl"
    valid.write_text("".join(json.dumps({"prompt": "ab" * n, "completion": "bbb"}) + "\n" for n in range(1, 7)))
    recipe = make_recipe(
        method={"kind": "lora", "r": 8, "trainable_token_indices": [2]},  # the end token's row is zero in this base
        data={"valid": str(valid), "train": str(valid), "allow_overlap": True},
        optim={"lr": 0.02},
        train={"max_steps": 40, "batch_size": 6},
        eval={"metric": metric, "every": 10, "rows": 4},
    )
    summary = train(recipe)
    lines = [json.loads(line) for line in (summary.out / "metrics.jsonl").read_text().splitlines()]
    values = {line["step"]: line[metric] for line in lines if line["event"] == "eval"}
    assert list(values) == [10, 20, 30, 40]
    assert summary.best_score == max(values.values())
    assert values[summary.best_step or 0] == summary.best_score
    assert read_adapter(summary.out).record["metrics"][metric] == summary.best_score
    assert max(values.values()) > 0


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "lora", "r": 4},
        {"kind": "prefix", "num_virtual_tokens": 3},
        {"kind": "prompt", "num_virtual_tokens": 3},
        {"kind": "bottleneck", "reduction_factor": 8},
    ],
    ids=lambda method: str(method["kind"]),
)
@pytest.mark.parametrize("positions", [512, 40, 1])
def test_answers_of_a_batch_are_those_of_each_prompt_alone(
    make_recipe: MakeRecipe, tiny_base: Path, tmp_path: Path, method: dict[str, Any], positions: int
) -> None:
    model, tokenizer = load_base(tiny_base)
    attach(model, Recipe.model_validate({"method": method, "data": {"train": "x"}}).methods[0])
    examples = read_examples(str(write_valid(tmp_path)), tokenizer, max_length=64)
    together = generate_answers(model, tokenizer, examples, [5, 3, 5, 4, 5, 5], batch_positions=positions)
    alone = [
        generate_answers(model, tokenizer, [example], [limit], batch_positions=positions)[0]
        for example, limit in zip(examples, [5, 3, 5, 4, 5, 5], strict=True)
    ]
    assert together == alone
    assert model.training is False


def test_accuracy_of_answers_is_that_of_the_reference_itself(tiny_base: Path, tmp_path: Path) -> None:
    model, tokenizer = load_base(tiny_base)
    examples = read_examples(str(write_valid(tmp_path)), tokenizer, max_length=64)
    given = generate_answers(model, tokenizer, examples, [4] * 6, batch_positions=512)
    own = [
        Example(example.where, answer.text, example.prompt_ids, answer.token_ids)
        for example, answer in zip(examples, given, strict=True)
    ]
    assert score(own, given, "accuracy").value == 1.0


def test_a_prompt_at_the_end_of_the_context_is_answered_with_nothing(tiny_base: Path) -> None:
    model, tokenizer = load_base(tiny_base)
    full = Example("x:1", "b", (70,) * 256, (71,))
    (answer,) = generate_answers(model, tokenizer, [full], [5], batch_positions=512)
    assert answer.token_ids == ()


def test_a_metric_of_answers_needs_held_out_rows(make_recipe: MakeRecipe) -> None:
    with pytest.raises(ValueError, match=r"eval\.metric exact_match needs data\.valid"):
        make_recipe(eval={"metric": "exact_match"})


def test_paged_moments_without_a_gpu_are_refused(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"optim\.name: paged_adamw_8bit .* there is no GPU: use adamw_8bit"):
        dry_run(make_recipe(optim={"name": "paged_adamw_8bit"}))


def test_an_export_that_would_fail_fails_before_the_first_step(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RunError("no room on the disk")

    monkeypatch.setattr("peftkit.train.run.save_adapter", full)
    recipe = make_recipe()
    with pytest.raises(RunError, match="no room on the disk"):
        train(recipe)
    assert not Path(recipe.out).exists()
