"""What a run trains, what it leaves frozen, and in which numbers: by every kind of method."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import peftkit.train.loop
from peftkit.artifact import load_adapter, read_adapter, save_adapter
from peftkit.base import load_base
from peftkit.data import Dataset, collate
from peftkit.methods import LoraConfig, PromptTuningConfig, attach, attached
from peftkit.recipe import Recipe
from peftkit.train import train
from peftkit.train.checkpoint import latest_checkpoint
from peftkit.train.loop import Trainer, accumulate_gradients
from peftkit.train.memory import num_trainable
from peftkit.train.prepare import Prepared, prepare

MakeRecipe = Callable[..., Recipe]

LORA = {"kind": "lora", "r": 4, "alpha": 8.0}
METHODS: dict[str, Any] = {
    "lora": LORA,
    "dora": {**LORA, "variant": "dora"},
    "lora on the head": {**LORA, "targets": ["lm_head", "v_proj"]},
    "lora on the embedding": {**LORA, "targets": ["embed_tokens", "v_proj"]},
    "modules_to_save": {**LORA, "targets": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "token_rows": {**LORA, "targets": ["q_proj"], "trainable_token_indices": [3, 70, 100]},
    "houlsby": {"kind": "bottleneck", "reduction_factor": 8},
    "prefix": {"kind": "prefix", "num_virtual_tokens": 4},
    "ptuning_v2": {"kind": "ptuning_v2", "num_virtual_tokens": 4},
    "ptuning": {"kind": "ptuning", "num_virtual_tokens": 4},
    "prompt": {"kind": "prompt", "num_virtual_tokens": 4},
}

FEW = ["lora", "token_rows", "houlsby", "prefix", "ptuning", "prompt"]


def recipe_of(make: MakeRecipe, kind: str, **sections: Any) -> Recipe:
    return Recipe.model_validate({**make(**sections).model_dump(), "method": METHODS[kind]})


def write_valid(tmp_path: Path) -> str:
    path = tmp_path / "valid.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab" * n, "completion": "b" * n}) + "\n" for n in range(1, 4)))
    return str(path)


def loss_through_logits(prepared: Prepared, rows: int) -> Tensor:
    """Mean over the target tokens of some rows, each alone, through the model's own logits."""
    assert isinstance(prepared.train, Dataset)
    summed, count = torch.zeros((), dtype=torch.float64), 0
    for sample in prepared.train.samples[:rows]:
        ids = torch.from_numpy(sample.ids).long()
        targets = torch.from_numpy(sample.trained)[1:].nonzero()[:, 0]
        logits = prepared.model(input_ids=ids[None]).logits[0, targets]
        summed = summed + F.cross_entropy(logits, ids[targets + 1], reduction="sum")
        count += len(targets)
    return summed / count


def gradients(prepared: Prepared) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in prepared.parameters.items() if p.grad is not None}
    prepared.model.zero_grad()
    return found


@pytest.mark.parametrize("kind", METHODS)
def test_the_loss_and_its_gradients_are_those_of_the_models_own_logits(
    make_recipe: MakeRecipe, kind: str, seed: int
) -> None:
    """An adapter on the output layer, or on an embedding that is tied to it, is part of what is trained."""
    prepared = prepare(recipe_of(make_recipe, kind))
    prepared.model.double()
    for parameter in prepared.parameters.values():
        parameter.data += 0.2 * torch.randn_like(parameter)
    reference = loss_through_logits(prepared, 4)
    reference.backward()
    wanted = gradients(prepared)
    assert isinstance(prepared.train, Dataset)
    loss = accumulate_gradients(prepared.model, [collate(prepared.train.samples[:4])])
    found = gradients(prepared)
    assert loss == pytest.approx(reference.item(), rel=1e-9)
    assert wanted.keys() == found.keys() == prepared.parameters.keys()
    for name, gradient in wanted.items():
        assert gradient.any(), name
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", METHODS)
def test_a_step_changes_all_that_is_trained_and_nothing_else(
    make_recipe: MakeRecipe, tmp_path: Path, kind: str, recompute: str
) -> None:
    """The step after the first: a LoRA's A has no gradient while its B is zero."""
    prepared = prepare(recipe_of(make_recipe, kind, train={"gradient_checkpointing": recompute, "batch_size": 24}))
    before = {name: value.clone() for name, value in prepared.model.named_parameters()}
    trainer = Trainer(prepared, tmp_path / "run", {})
    trainer._step()
    if prepared.recipe.methods[0].kind == "lora":
        assert all(p.any() for name, p in prepared.parameters.items() if "_B" in name)
    trainer._step()
    for name, value in prepared.model.named_parameters():
        assert torch.equal(value, before[name]) != value.requires_grad, name
    assert {id(p) for p in prepared.parameters.values()} == {
        id(p) for p in prepared.model.parameters() if p.requires_grad
    }


def frozen_bytes(model: PreTrainedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_preparing_a_run_makes_no_frozen_weight_larger(make_recipe: MakeRecipe, kind: str, quant: str) -> None:
    settings = {"kind": quant, "compute_dtype": "bfloat16"}
    recipe = recipe_of(make_recipe, kind, quant=settings)
    bare, _ = load_base(recipe.base, quant=quant, compute_dtype="bfloat16", dtype="bfloat16")  # type: ignore[arg-type]
    prepared = prepare(recipe)
    assert frozen_bytes(prepared.model) <= frozen_bytes(bare)
    assert prepared.model.get_input_embeddings().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", FEW)
def test_a_base_in_16_bits_trains_an_adapter_in_32(make_recipe: MakeRecipe, kind: str, dtype: str) -> None:
    recipe = recipe_of(make_recipe, kind, quant={"kind": "none", "compute_dtype": dtype}, train={"max_steps": 2})
    summary = train(recipe)
    assert summary.skipped_steps == 0
    checkpoint = latest_checkpoint(summary.out / "state")
    assert checkpoint is not None
    assert {tensor.dtype for tensor in checkpoint.adapter.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in checkpoint.adapter.values())


# what is loaded ------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tiny_base: Path) -> PreTrainedModel:
    return load_base(tiny_base)[0]


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("trainable", [False, True])
def test_a_loaded_adapter_is_frozen_or_trained_whole(
    make_recipe: MakeRecipe, base: PreTrainedModel, tmp_path: Path, kind: str, trainable: bool
) -> None:
    save_adapter(attach(base, recipe_of(make_recipe, kind).methods[0]), tmp_path / "a")
    model, _ = load_base(make_recipe().base)
    load_adapter(model, tmp_path / "a", trainable=trainable).train()
    parts = {id(p) for p in attached(model)[0].parameters().values()} if trainable else set()
    assert {id(p) for p in model.parameters() if p.requires_grad} == parts


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_loading_one_adapter_leaves_the_other_as_trainable_as_it_was(
    base: PreTrainedModel, tiny_base: Path, tmp_path: Path, first: bool, second: bool
) -> None:
    save_adapter(attach(base, LoraConfig(r=2, modules_to_save=["norm"])), tmp_path / "lora")
    save_adapter(attach(load_base(tiny_base)[0], PromptTuningConfig(num_virtual_tokens=2)), tmp_path / "prompt")
    for names in (("lora", "prompt"), ("prompt", "lora")):
        model, _ = load_base(tiny_base)
        for name, trainable in zip(names, (first, second), strict=True):
            load_adapter(model, tmp_path / name, trainable=trainable)
        for method, trainable in zip(attached(model), (first, second), strict=True):
            assert all(p.requires_grad is trainable for p in method.parameters().values()), method.kind


# what is written -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW)
def test_the_exported_best_is_the_weights_of_its_step(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    given = iter([3.0, 2.0, 4.0])
    monkeypatch.setattr(peftkit.train.loop.Trainer, "_mean_loss", lambda *_: next(given))
    recipe = recipe_of(
        make_recipe, kind, data={"valid": write_valid(tmp_path)}, eval={"every": 2}, train={"save_every": 4}
    )
    summary = train(recipe)
    assert (summary.best_step, summary.steps, summary.exported) == (4, 6, "best")
    (summary.out / "state" / "step-6" / "manifest.json").unlink()
    checkpoint = latest_checkpoint(summary.out / "state")
    assert checkpoint is not None and checkpoint.state.step == 4
    prepared = prepare(recipe)
    for name, parameter in prepared.parameters.items():
        parameter.data.copy_(checkpoint.adapter[name])
    wanted = save_adapter(prepared.model, tmp_path / "wanted")
    assert read_adapter(summary.out).uid == wanted.uid != read_adapter(summary.out / "last").uid


@pytest.mark.parametrize("kind", METHODS)
def test_a_checkpoint_and_an_export_hold_nothing_of_the_base(
    make_recipe: MakeRecipe, tmp_path: Path, kind: str
) -> None:
    recipe = recipe_of(make_recipe, kind, data={"valid": write_valid(tmp_path)}, train={"max_steps": 1})
    summary = train(recipe)
    trained = 4 * summary.trainable_parameters
    (checkpoint,) = (summary.out / "state").iterdir()
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.is_file()}
    headers = 300 * len(prepare(recipe).parameters)
    assert sizes["adapter.safetensors"] <= trained + headers
    assert sizes["optimizer.safetensors"] <= 2 * trained + 4 * headers
    assert (summary.out / "adapter_model.safetensors").stat().st_size <= 1.1 * trained + headers


def test_an_adapter_names_its_base_and_its_targets_as_they_were_given(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(train={"max_steps": 1})
    assert isinstance(recipe.method, LoraConfig) and recipe.method.targets == "all-linear"
    summary = train(recipe)
    fields = json.loads((summary.out / "adapter_config.json").read_text())
    record = json.loads((summary.out / "peftkit.json").read_text())
    assert fields["base_model_name_or_path"] == record["base"]["id"] == recipe.base
    assert all(record["base"]["fingerprint"].values())
    assert record["recipe"]["method"]["targets"] == "all-linear"
    assert Recipe.model_validate(record["recipe"]) == recipe
    exported = read_adapter(summary.out).config
    assert isinstance(exported, LoraConfig)
    assert exported.targets == "all-linear" or all(len(name) > 1 for name in exported.targets)


# what is gone on with ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_step_without_a_rate_leaves_a_resumed_adapter_as_it_was_saved(
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    optimizer: Literal["adamw", "adamw_8bit"],
) -> None:
    """No optimiser holds weights of its own that a restored adapter would be overwritten with."""
    recipe = recipe_of(make_recipe, kind, optim={"name": optimizer}, train={"max_steps": 2})
    summary = train(recipe)
    checkpoint = latest_checkpoint(summary.out / "state")
    assert checkpoint is not None
    prepared = prepare(recipe)
    for parameter in prepared.parameters.values():
        nn.init.normal_(parameter)
    trainer = Trainer(prepared, summary.out, {})
    trainer.resume(checkpoint)
    assert num_trainable(prepared.model) == summary.trainable_parameters > 0
    monkeypatch.setattr(peftkit.train.loop, "learning_rate", lambda *_: 0.0)
    trainer._step()
    for name, parameter in prepared.parameters.items():
        assert torch.equal(parameter, checkpoint.adapter[name]), name
