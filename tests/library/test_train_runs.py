"""Several runs on one resident base, and several processes of one run."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import peftkit.train.prepare
from peftkit.base import load_base
from peftkit.data import collate, collate_packed
from peftkit.errors import InputError, RunError
from peftkit.methods import attached
from peftkit.recipe import Recipe, Runs
from peftkit.train import train, train_runs
from peftkit.train.checkpoint import RunState
from peftkit.train.folder import alone
from peftkit.train.loop import Trainer, accumulate_gradients
from peftkit.train.processes import share

MakeRecipe = Callable[..., Recipe]

LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"),
]

METHODS: list[Any] = [
    {"kind": "lora", "r": 4, "alpha": 8.0, "dropout": 0.2},
    {"kind": "prefix", "num_virtual_tokens": 3},
    [{"kind": "lora", "r": 2, "init": "pissa"}, {"kind": "prompt", "num_virtual_tokens": 2}],
]


def recipes(make: MakeRecipe, folder: Path, **sections: Any) -> list[Recipe]:
    """A run of each method, each with a seed of its own, the second with gradient checkpointing."""
    made = []
    for index, method in enumerate(METHODS):
        train = {"seed": index, "gradient_checkpointing": index == 1, **sections.get("train", {})}
        recipe = make(**{**sections, "train": train}, out=str(folder / str(index)))
        made.append(Recipe.model_validate({**recipe.model_dump(), "method": method}))
    return made


def weights(out: Path) -> dict[str, bytes]:
    return {str(file.relative_to(out)): file.read_bytes() for file in sorted(out.rglob("adapter_model.safetensors"))}


def losses(out: Path) -> list[float]:
    return figures(out, "loss")


def test_turns_do_not_hide_steps_that_are_skipped_in_a_row(make_recipe: MakeRecipe) -> None:
    ruined = make_recipe(optim={"lr": 1e30}, train={"max_steps": 12})
    good = ruined.model_copy(
        update={"out": f"{ruined.out}-good", "optim": ruined.optim.model_copy(update={"lr": 1e-3})}
    )
    with pytest.raises(RunError, match=rf"^{ruined.out}: 5 steps in a row, up to step 6, .*lower optim\.lr"):
        train_runs(Runs((good, ruined), turn_steps=2))


def test_runs_on_the_same_data_read_it_once(make_recipe: MakeRecipe, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "peftkit")
    one = make_recipe(train={"max_steps": 1})
    other = one.model_copy(update={"out": f"{one.out}-other"})
    train_runs(Runs((one, other)))
    shown = [line for line in caplog.messages if "of them trained" in line]
    assert len(shown) == 1 and shown[0].startswith(f"{one.out}, {other.out}: {one.data.train}: 24 rows")


def figures(out: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if line["event"] == "train"]


@pytest.mark.parametrize("turn_steps", [None, 2, 5])
def test_runs_on_one_base_give_the_bits_of_runs_apart(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn_steps: int | None
) -> None:
    apart = [train(recipe) for recipe in recipes(make_recipe, tmp_path / "apart")]
    loaded: list[str] = []
    monkeypatch.setattr(
        peftkit.train.prepare, "load_base", lambda *args, **kwargs: loaded.append("") or load_base(*args, **kwargs)
    )
    together = train_runs(Runs(tuple(recipes(make_recipe, tmp_path / "together")), turn_steps))
    assert len(loaded) == 1
    for one, other in zip(apart, together, strict=True):
        assert weights(one.out) == weights(other.out) and weights(one.out)
        assert losses(one.out) == losses(other.out)
        assert (one.uid, one.steps, one.train_loss) == (other.uid, other.steps, other.train_loss)


def test_starts_from_nf4_weights_are_those_of_runs_apart_after_a_prompt_was_trained(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    methods = [
        {"kind": "prompt", "num_virtual_tokens": 2},
        {"kind": "lora", "r": 2, "init": "pissa"},
        {"kind": "prefix", "num_virtual_tokens": 2},
        {"kind": "lora", "r": 2, "init": "loftq"},
    ]

    def made(folder: Path) -> list[Recipe]:
        content = make_recipe(quant={"kind": "nf4"}, train={"max_steps": 2}).model_dump()
        return [
            Recipe.model_validate({**content, "method": method, "out": str(folder / str(index))})
            for index, method in enumerate(methods)
        ]

    together = train_runs(Runs(tuple(made(tmp_path / "together"))))
    apart = [train(recipe) for recipe in made(tmp_path / "apart")]
    for one, other in zip(apart, together, strict=True):
        assert weights(one.out) == weights(other.out)


def test_a_fault_of_the_last_run_is_found_before_the_first_begins(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    first, second, _ = recipes(make_recipe, tmp_path)
    bad = second.model_copy(update={"data": second.data.model_copy(update={"train": str(tmp_path / "no.jsonl")})})
    with pytest.raises(InputError, match=r"no\.jsonl"):
        train_runs(Runs((first, bad)))
    assert not Path(first.out).exists()


def test_a_folder_that_is_being_trained_into_is_left_alone(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(out=str(tmp_path / "run"), train={"max_steps": 1})
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with alone(tmp_path / "link"):
        hows: list[dict[str, Any]] = [{}, {"resume": True}, {"overwrite": True}]
        for how in hows:
            with pytest.raises(InputError, match=f"out: .*run is being trained into by process {os.getpid()}"):
                train(recipe, **how)
        assert not (tmp_path / "run").exists()
    train(recipe)
    train(recipe, resume=True)


def test_between_equal_scores_the_loss_chooses() -> None:
    def is_best(best: tuple[float, float | None], now: tuple[float, float | None]) -> bool:
        state = RunState(best_step=1, best_loss=best[0], best_score=best[1])
        return Trainer._is_best(cast(Trainer, SimpleNamespace(state=state)), *now)

    assert is_best((2.0, 0.5), (1.0, 0.5)) and not is_best((2.0, 0.5), (3.0, 0.5))
    assert is_best((2.0, 0.5), (9.0, 0.6)) and not is_best((2.0, 0.5), (1.0, 0.4))
    assert is_best((2.0, None), (1.0, None)) and not is_best((2.0, None), (float("nan"), None))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("sizes", "count"), [([5], 2), ([1], 2), ([3, 1], 4), ([2, 2, 2], 2), ([4], 3)])
def test_shares_of_processes_are_all_rows_once(
    make_recipe: MakeRecipe, sizes: list[int], count: int, packed: bool
) -> None:
    prepared = peftkit.train.prepare.prepare(make_recipe())
    samples = list(prepared.train.samples)  # type: ignore[union-attr]
    rows = [[[samples.pop(), samples.pop()] for _ in range(size)] for size in sizes]
    batches = [collate_packed(batch) if packed else collate([row[0] for row in batch]) for batch in rows]
    shares = [share(batches, index, count) for index in range(count)]
    found = [row for own in shares for batch in own for row in batch.input_ids_BT.tolist()]
    wanted = [row for batch in batches for row in batch.input_ids_BT.tolist()]
    assert sorted(found) == sorted(wanted)
    assert all((batch.segments_BT is not None) is packed for own in shares for batch in own)
    for figure in ("num_tokens", "num_target_tokens"):
        assert sum(getattr(b, figure) for own in shares for b in own) == sum(getattr(b, figure) for b in batches)
    assert attached(prepared.model)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_shares_add_up_to_that_of_the_step(
    make_recipe: MakeRecipe, count: int, packed: bool, seed: int
) -> None:
    prepared = peftkit.train.prepare.prepare(make_recipe())
    model = prepared.model.double()
    for parameter in prepared.parameters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    samples = prepared.train.samples  # type: ignore[union-attr]
    batches = [collate(samples[:5]), collate(samples[5:6])]
    if packed:
        batches = [collate_packed([samples[:3], samples[3:5]]), collate_packed([samples[5:8]])]
    num_targets = sum(batch.num_target_tokens for batch in batches)

    def gradient() -> torch.Tensor:
        taken = torch.cat([p.grad.flatten() for p in prepared.parameters.values() if p.grad is not None])
        model.zero_grad()
        return taken

    whole_loss = accumulate_gradients(model, batches)
    whole = gradient()
    loss, summed = 0.0, torch.zeros_like(whole)
    for index in range(count):
        loss += accumulate_gradients(model, share(batches, index, count), num_targets=num_targets)
        summed += gradient()
    assert loss == pytest.approx(whole_loss, rel=1e-9)
    assert (summed - whole).norm() <= 1e-9 * whole.norm()


def test_two_processes_train_as_one(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    valid = tmp_path / "valid.jsonl"
    rows = [{"prompt": "ab" * n, "completion": " " + "b" * n} for n in range(1, 6)]
    valid.write_text("".join(json.dumps(row) + "\n" for row in rows))
    method = {"kind": "lora", "r": 4, "targets": ["q_proj"], "modules_to_save": ["layers.1.mlp.up_proj"]}

    def recipe(name: str) -> Recipe:
        made = make_recipe(
            data={"valid": str(valid), "packing": False},
            train={"max_steps": 4, "batch_size": 5, "gradient_checkpointing": True},  # an odd batch, split by rows
            optim={"lr": 1e-3},
            out=str(tmp_path / name),
        )
        return Recipe.model_validate({**made.model_dump(), "method": method})

    one = train(recipe("one"))
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps(recipe("two").model_dump(mode="json")))
    ended = subprocess.run(
        [*LAUNCH, "-m", "peftkit.cli.main", "train", str(path), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    two = json.loads(ended.stdout)  # one object: one process prints
    state = json.loads((tmp_path / "two" / "state" / "step-4" / "state.json").read_text())
    assert state["identity"]["processes"] == len(state["generators"]) == 2
    assert two["steps"] == one.steps == 4
    assert two["tokens"] == one.tokens
    assert losses(tmp_path / "two") == pytest.approx(losses(one.out), rel=1e-5)
    assert two["eval_loss"] == pytest.approx(one.eval_loss, rel=1e-5)
    assert figures(tmp_path / "two", "grad_norm") == pytest.approx(figures(one.out, "grad_norm"), rel=1e-5)
    a, b = (averaged_gradients(out / "state" / "step-4") for out in (one.out, tmp_path / "two"))
    assert (a - b).norm() <= 1e-5 * a.norm()


def averaged_gradients(checkpoint: Path) -> torch.Tensor:
    """AdamW's first moments: Σ over steps of a factor times the step's gradient."""
    tensors = load_file(checkpoint / "optimizer.safetensors")
    found = [tensors[name].flatten() for name in sorted(tensors) if name.endswith("/exp_avg")]
    assert len(found) >= 3
    return torch.cat(found)
