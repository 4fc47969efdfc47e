"""The training loop on a tiny base: its arithmetic, its reproducibility, what it writes and what it refuses."""

import builtins
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import peftkit.train.loop
import peftkit.train.loss
from peftkit.artifact import load_adapter, read_adapter
from peftkit.base import load_base
from peftkit.data import Sample, collate, load_dataset, plan_epoch
from peftkit.errors import DataError, InputError, RecipeError
from peftkit.methods import attached
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
from peftkit.train.loop import accumulate_gradients
from peftkit.train.loss import projected_loss_sum
from peftkit.train.prepare import prepare

MakeRecipe = Callable[..., Recipe]

LORA = {"kind": "lora", "r": 4, "alpha": 8.0, "dropout": 0.1}
METHODS = [LORA, {"kind": "prompt", "num_virtual_tokens": 4}]


def by_kind(method: dict[str, Any]) -> str:
    return str(method["kind"])


def method_recipe(make: MakeRecipe, method: dict[str, Any], **sections: Any) -> Recipe:
    return make(**sections).model_copy(
        update={"method": Recipe.model_validate({"method": method, "data": {"train": "x"}}).method}
    )


def metrics(out: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def adapter_bytes(out: Path) -> bytes:
    return (out / "adapter_model.safetensors").read_bytes()


def reference_loss(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """Mean over all target tokens, each row alone and through transformers' own logits."""
    summed, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        ids = torch.from_numpy(sample.ids).long()
        logits = model(input_ids=ids[None]).logits[0]
        targets = torch.from_numpy(sample.trained)[1:].nonzero()[:, 0]
        summed = summed + F.cross_entropy(logits[targets].double(), ids[targets + 1], reduction="sum")
        count += len(targets)
    return summed / count


# the loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
def test_projected_loss_has_the_value_and_gradients_of_plain_cross_entropy(
    seed: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peftkit.train.loss, "CHUNK_LOGITS", 31 * chunk)
    head = nn.Linear(8, 31, dtype=torch.float64)
    head.weight.requires_grad_(False)
    hidden = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(31, (12,))
    ours = projected_loss_sum(hidden, targets, head)
    plain = F.cross_entropy(head(hidden), targets, reduction="sum")
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)
    inputs = [hidden, head.bias]
    for mine, reference in zip(
        torch.autograd.grad(ours * 0.3, inputs), torch.autograd.grad(plain * 0.3, inputs), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(projected_loss_sum(hidden, targets, head), plain, rtol=1e-12, atol=0)


def double(make_recipe: MakeRecipe, method: dict[str, Any]) -> tuple[PreTrainedModel, Sequence[Sample]]:
    """A model in float64 whose adapter has random weights, and eight rows of very unequal length."""
    prepared = prepare(method_recipe(make_recipe, {**method, "dropout": 0.0} if method is LORA else method))
    model = prepared.model.double()
    for parameter in prepared.parameters.values():
        nn.init.normal_(parameter, std=0.2)
    return model, prepared.train.samples[:8]


def gradients(model: PreTrainedModel) -> list[Tensor]:
    """The adapter's gradients, taken away."""
    taken = []
    for method in attached(model):
        for parameter in method.parameters().values():
            assert parameter.grad is not None
            taken.append(parameter.grad)
            parameter.grad = None
    return taken


@pytest.mark.parametrize("method", METHODS, ids=by_kind)
def test_one_batch_of_eight_two_of_four_and_eight_of_one_give_one_gradient(
    make_recipe: MakeRecipe, method: dict[str, Any], seed: int
) -> None:
    model, samples = double(make_recipe, method)
    lengths = [len(sample.ids) for sample in samples]
    assert max(lengths) > 3 * min(lengths)
    reference = reference_loss(model, samples)
    reference.backward()
    expected = gradients(model)
    norm = torch.cat([grad.flatten() for grad in expected]).norm()
    for size in (8, 4, 1):
        loss = accumulate_gradients(model, [collate(samples[i : i + size]) for i in range(0, 8, size)])
        assert loss == pytest.approx(reference.item(), rel=1e-6)
        difference = torch.cat([(a - b).flatten() for a, b in zip(gradients(model), expected, strict=True)]).norm()
        assert difference <= 1e-6 * norm, size


def test_every_window_and_the_last_partial_one_is_the_mean_over_its_target_tokens(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(optim={"lr": 1e-30}, train={"max_steps": None, "epochs": 2, "batch_size": 2, "grad_accum": 5})
    train(recipe)
    prepared = prepare(recipe)
    expected = []
    for epoch in range(2):
        plan = plan_epoch(prepared.train.lengths, seed=0, epoch=epoch, batch_tokens=0, batch_size=2)
        for window in (plan[:5], plan[5:10], plan[10:]):
            rows = [prepared.train.samples[row] for batch in window for row in batch]
            expected.append(reference_loss(prepared.model, rows).item())
    logged = [line["loss"] for line in metrics(Path(recipe.out), "train")]
    assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", METHODS, ids=by_kind)
def test_gradient_checkpointing_changes_no_gradient(make_recipe: MakeRecipe, method: dict[str, Any]) -> None:
    found = []
    for checkpointing in (False, True):
        prepared = prepare(method_recipe(make_recipe, method, train={"gradient_checkpointing": checkpointing}))
        assert prepared.model.base_model.layers[0].gradient_checkpointing is checkpointing
        torch.manual_seed(1)
        for parameter in prepared.parameters.values():
            nn.init.normal_(parameter, std=0.2)
        loss = accumulate_gradients(prepared.model, [collate(prepared.train.samples[:4])])
        found.append((loss, gradients(prepared.model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


# the schedule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=by_kind)
def test_one_seed_gives_the_same_bits_and_another_seed_other_ones(
    make_recipe: MakeRecipe, tmp_path: Path, method: dict[str, Any]
) -> None:
    bits = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        torch.randn(7)  # what was drawn before doesn't matter
        train(method_recipe(make_recipe, method, train={"seed": seed, "grad_accum": 2}, out=str(tmp_path / name)))
        bits.append(adapter_bytes(tmp_path / name))
    assert bits[0] == bits[1]
    assert bits[0] != bits[2]


@pytest.mark.parametrize("method", METHODS, ids=by_kind)
def test_training_lowers_the_loss(make_recipe: MakeRecipe, method: dict[str, Any]) -> None:
    lr = 0.02 if method is LORA else 0.1
    recipe = method_recipe(make_recipe, method, optim={"lr": lr}, train={"max_steps": 40, "batch_size": 24})
    summary = train(recipe)
    losses = [line["loss"] for line in metrics(summary.out, "train")]
    assert losses[-1] < 0.8 * losses[0]
    assert summary.train_loss == losses[-1]


@pytest.mark.parametrize("method", METHODS, ids=by_kind)
def test_the_exported_adapter_has_the_loss_that_its_evaluation_had(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_base: Path, method: dict[str, Any]
) -> None:
    valid = write_valid(tmp_path)
    summary = train(method_recipe(make_recipe, method, data={"valid": str(valid)}, eval={"every": 2}))
    model, tokenizer = load_base(tiny_base, device="cpu")
    bare = reference_loss(model, load_dataset(str(valid), tokenizer, max_length=128).samples)
    load_adapter(model, summary.out)
    loss = reference_loss(model, load_dataset(str(valid), tokenizer, max_length=128).samples)
    assert summary.best_loss == pytest.approx(loss.item(), rel=1e-5)
    assert abs(bare.item() - loss.item()) > 1e-4
    assert [line["step"] for line in metrics(summary.out, "eval")] == [2, 4, 6]


def test_training_over_an_nf4_base_lowers_the_loss(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(quant={"kind": "nf4"}, optim={"lr": 0.02}, train={"max_steps": 20, "batch_size": 8})
    summary = train(recipe)
    losses = [line["loss"] for line in metrics(summary.out, "train")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert read_adapter(summary.out).record["quant"] == "nf4"


def write_valid(tmp_path: Path) -> Path:
    path = tmp_path / "valid.jsonl"
    rows = [{"prompt": "ab" * n, "completion": " " + "b" * n} for n in range(1, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def worsening(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Evaluations give these losses, one after another."""
    given = iter(losses)
    monkeypatch.setattr(peftkit.train.loop.Trainer, "_mean_loss", lambda *_: next(given))


def test_the_best_and_the_last_are_kept_apart_and_the_best_is_exported(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worsening(monkeypatch, [3.0, 2.0, 4.0])
    summary = train(make_recipe(data={"valid": str(write_valid(tmp_path))}, eval={"every": 2}))
    assert (summary.best_step, summary.best_loss, summary.eval_loss, summary.exported) == (4, 2.0, 4.0, "best")
    best, last, out = (read_adapter(path) for path in (summary.out / "best", summary.out / "last", summary.out))
    assert out.uid == best.uid == summary.uid != last.uid
    assert (best.record["step"], last.record["step"], out.record["step"]) == (4, 6, 4)


def test_early_stop_ends_after_so_many_evaluations_without_a_new_best(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worsening(monkeypatch, [3.0, 2.0, 2.0, math.nan])
    recipe = make_recipe(
        data={"valid": str(write_valid(tmp_path))}, eval={"every": 1, "early_stop": 2}, train={"max_steps": 50}
    )
    summary = train(recipe)
    assert (summary.steps, summary.total_steps, summary.stopped_early, summary.best_step) == (4, 50, True, 2)


def test_without_valid_data_the_last_weights_are_the_adapter(make_recipe: MakeRecipe) -> None:
    summary = train(make_recipe())
    assert (summary.exported, summary.best_loss, summary.eval_loss) == ("last", None, None)
    assert not (summary.out / "best").exists() and not (summary.out / "last").exists()
    assert read_adapter(summary.out).record["step"] == 6


def test_epochs_give_the_number_of_steps(make_recipe: MakeRecipe) -> None:
    summary = train(make_recipe(train={"max_steps": None, "epochs": 3, "batch_size": 5, "grad_accum": 2}))
    assert summary.steps == summary.total_steps == 9  # 24 rows: 5 batches, 3 windows an epoch
    rows_seen = summary.target_tokens
    assert rows_seen == 3 * read_adapter(summary.out).record["data"]["train"]["target_tokens"]


# what a run writes ---------------------------------------------------------------------------------------------------


def test_a_run_records_what_made_it(make_recipe: MakeRecipe, tmp_path: Path, tiny_base: Path) -> None:
    recipe = make_recipe(data={"valid": str(write_valid(tmp_path))})
    summary = train(recipe)
    run = json.loads((summary.out / "run.json").read_text())
    assert run["status"] == "finished"
    assert Recipe.model_validate(run["recipe"]) == recipe
    assert run["summary"]["steps"] == 6
    assert run["summary"]["uid"] == summary.uid
    record = read_adapter(summary.out).record
    for found in (run, record):
        assert found["base"]["id"] == str(tiny_base)
        assert set(found["base"]["fingerprint"]) == {"architecture", "config", "weights", "tokenizer"}
        assert found["quant"] == "none"
        assert found["data"]["train"]["rows"] == 24
        assert found["data"]["train"]["sha256"] != found["data"]["valid"]["sha256"]
        assert found["chat_template"]["text"].startswith("{% for m in messages %}")
        assert found["tokenizer_sha256"] == found["base"]["fingerprint"]["tokenizer"]
        assert found["seed"] == 0
        assert found["versions"]["torch"] == torch.__version__
    assert record["metrics"]["eval_loss"] == summary.eval_loss


def test_metrics_have_a_line_every_so_many_steps_and_at_the_end(make_recipe: MakeRecipe) -> None:
    summary = train(make_recipe(train={"max_steps": 7}, log={"every": 3}))
    lines = metrics(summary.out, "train")
    assert [line["step"] for line in lines] == [3, 6, 7]
    for line in lines:
        assert {"loss", "lr", "grad_norm", "tokens", "target_tokens", "tokens_per_s", "seconds"} <= set(line)
    assert lines[-1]["tokens"] == summary.tokens
    assert [line["tokens"] for line in lines] == sorted(line["tokens"] for line in lines)


def test_tensorboard_curves_are_written_where_the_package_is_installed(make_recipe: MakeRecipe) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed: pip install '.[test]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = train(make_recipe(log={"tensorboard": True}))
    events = EventAccumulator(str(summary.out / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_missing_tensorboard_is_one_line_and_no_failure(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    caplog.set_level(logging.INFO, "peftkit")
    summary = train(make_recipe(log={"tensorboard": True}))
    assert not (summary.out / "tensorboard").exists()
    assert sum("tensorboard package is not installed" in record.message for record in caplog.records) == 1


def test_wandb_without_its_package_is_refused_before_anything_is_loaded(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit.train.folder.find_spec", lambda name: None)
    monkeypatch.setattr("peftkit.train.run.load", None)
    recipe = make_recipe(log={"wandb": True})
    with pytest.raises(InputError, match=r"log\.wandb: the wandb package is not installed: pip install wandb"):
        train(recipe)
    assert not Path(recipe.out).exists()


def test_wandb_gets_the_figures_of_the_log_where_it_is_installed(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb isn't installed; what is said without it is tested")
    monkeypatch.setenv("WANDB_MODE", "offline")
    summary = train(make_recipe(log={"wandb": True}))
    assert list((summary.out / "wandb").glob("offline-run-*/*.wandb"))
    assert wandb.run is None


class RecordingBar:
    """A progress display that remembers."""

    def __init__(self, description: str, *, total: int | None = None, unit: str = "it") -> None:
        self.total, self.updates, self.closed = total, [], False

    def update(self, n: int = 1, **figures: float) -> None:
        self.updates.append(figures)

    def close(self) -> None:
        self.closed = True


def test_progress_shows_loss_learning_rate_and_tokens_per_second_at_each_step(make_recipe: MakeRecipe) -> None:
    bars: list[RecordingBar] = []

    def opened(*args: Any, **kwargs: Any) -> RecordingBar:
        bars.append(RecordingBar(*args, **kwargs))
        return bars[-1]

    train(make_recipe(), progress=opened)
    (bar,) = bars
    assert bar.total == 6 and bar.closed
    assert len(bar.updates) == 6
    assert all(set(figures) == {"loss", "lr", "tokens_per_s", "memory_gb"} for figures in bar.updates)


def test_a_folder_that_holds_a_run_is_refused_and_replaced_when_told_so(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    first = train(recipe)
    (first.out / "notes.txt").write_text("mine")
    before = adapter_bytes(first.out)
    with pytest.raises(InputError, match=r"already holds a run .* --resume .* --overwrite .* out=FOLDER"):
        train(make_recipe(train={"seed": 4}))
    assert adapter_bytes(first.out) == before
    with pytest.raises(InputError, match="give one of the two"):
        train(recipe, resume=True, overwrite=True)
    with pytest.raises(InputError, match="no such"):
        train(make_recipe(data={"train": "example:nothing"}), overwrite=True)
    assert adapter_bytes(first.out) == before, "a run that can't begin removes nothing"
    train(make_recipe(train={"seed": 4}), overwrite=True)
    assert adapter_bytes(first.out) != before
    assert len(metrics(first.out, "train")) == 6
    assert (first.out / "notes.txt").read_text() == "mine"


def test_an_out_that_is_a_file_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"out: .*file is a file, not a folder"):
        train(make_recipe(out=str(tmp_path / "file")))


# what goes wrong -----------------------------------------------------------------------------------------------------


def test_a_row_beyond_the_context_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a" * 253, "completion": "b"}))
    prompt = {"kind": "prompt", "num_virtual_tokens": 2}
    with pytest.raises(InputError, match=r"the longest row takes 257 positions, the base has 256: .* to 254 or less"):
        dry_run(method_recipe(make_recipe, prompt, data={"max_length": 300}))


def test_bad_data_is_found_before_the_base_is_loaded(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": ')
    with pytest.raises(DataError, match=r"train.jsonl:2: broken JSON"):
        train(make_recipe())


def test_truncated_prompts_are_reported(make_recipe: MakeRecipe, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "peftkit")
    summary = train(make_recipe(data={"max_length": 15}))
    cut = read_adapter(summary.out).record["data"]["train"]["truncated_rows"]
    assert cut > 0
    assert f"truncated {cut}, dropped 0" in caplog.text


def test_checkpointing_where_the_base_has_none_is_refused(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "supports_gradient_checkpointing", False)
    monkeypatch.setattr("transformers.LlamaPreTrainedModel.supports_gradient_checkpointing", False)
    with pytest.raises(RecipeError, match=r"train.gradient_checkpointing: this base doesn't support it"):
        dry_run(make_recipe(train={"gradient_checkpointing": True}))


# before a run --------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(data={"valid": str(write_valid(tmp_path))})
    plan = dry_run(recipe)
    summary_of_real_run = train(recipe.model_copy(update={"out": str(tmp_path / "real")}))
    assert not Path(recipe.out).exists()
    assert plan.trainable_parameters == summary_of_real_run.trainable_parameters
    assert plan.base_parameters == summary_of_real_run.base_parameters
    assert plan.steps == 6
    assert plan.memory_total == sum(plan.memory.parts().values())
    assert plan.memory.adapter == plan.memory.gradients == 4 * plan.trainable_parameters
    assert [piece.trained for piece in plan.sample] == [False, True]
    assert plan.sample[1].text.endswith("<|im_end|>")
    assert plan.valid is not None and plan.valid["rows"] == 6


def test_base_parameters_are_counted_by_shape_also_when_four_bits_hold_them(make_recipe: MakeRecipe) -> None:
    plain, packed = (dry_run(make_recipe(quant={"kind": kind})) for kind in ("none", "nf4"))
    assert plain.base_parameters == packed.base_parameters
    assert packed.memory.weights < plain.memory.weights


def test_8_bit_moments_are_estimated_at_a_quarter(make_recipe: MakeRecipe) -> None:
    plain, small = (dry_run(make_recipe(optim={"name": name})).memory for name in ("adamw", "adamw_8bit"))
    assert 4 * small.optimizer == plain.optimizer
