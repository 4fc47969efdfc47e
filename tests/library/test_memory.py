"""The estimate of a step's memory beside what a process really held."""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import peftkit.train.memory
from peftkit.errors import InputError, RecipeError
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
from peftkit.train.fit import estimate
from peftkit.train.loop import Trainer, accumulate_gradients
from peftkit.train.prepare import prepare

MakeRecipe = Callable[..., Recipe]

CHILD = """
import json, sys
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
recipe = Recipe.model_validate_json(sys.argv[1])
print(json.dumps(dry_run(recipe).memory_total if sys.argv[2] == "estimate" else train(recipe).peak_memory_bytes))
"""
"""One process for each figure, as a user has it: a peak counts from the start of a process."""

LORA = {"kind": "lora", "r": 8}
CASES: dict[str, dict[str, Any]] = {
    "lora, packed, 8 rows": {"method": LORA, "rows": 8},
    "lora, padded, 16 rows, checkpointing": {
        "method": LORA, "rows": 16, "packing": False, "gradient_checkpointing": True
    },
    "prefix, packed, 8 rows": {"method": {"kind": "prefix", "num_virtual_tokens": 8}, "rows": 8},
    "lora over nf4, packed, 8 rows": {"method": LORA, "rows": 8, "quant": "nf4"},
    "bottleneck over nf4, padded, 12 rows, checkpointing": {
        "method": {"kind": "bottleneck", "reduction_factor": 8}, "rows": 12, "quant": "nf4", "packing": False,
        "gradient_checkpointing": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def medium_base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medium-base")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", list(CASES))
def test_the_estimate_is_within_15_percent_of_the_peak(medium_base: Path, tmp_path: Path, case: str) -> None:
    settings = CASES[case]
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": "ab" * 100 + "c" * i, "completion": "c" * 100} for i in range(settings["rows"])]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "base": str(medium_base),
        "quant": {"kind": settings.get("quant", "none")},
        "method": settings["method"],
        "data": {"train": str(rows), "packing": settings.get("packing", True)},
        "train": {
            "max_steps": 2,
            "batch_size": settings["rows"],
            "gradient_checkpointing": settings.get("gradient_checkpointing", False),
        },
        "log": {"samples": 0, "tensorboard": False},
        "out": str(tmp_path / "run"),
    }
    estimate, peak = (figure(recipe, what) for what in ("estimate", "peak"))
    print(f"estimate {estimate / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert estimate == pytest.approx(peak, rel=0.15)


def figure(recipe: dict[str, Any], what: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(recipe), what], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_a_rehearsal_leaves_weights_gradients_and_generators_as_they_were(make_recipe: MakeRecipe) -> None:
    prepared = prepare(make_recipe(method={"kind": "lora", "r": 4, "dropout": 0.3}))
    before = {name: parameter.detach().clone() for name, parameter in prepared.model.named_parameters()}
    state = torch.get_rng_state()
    assert estimate(prepared).activations > 0
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in prepared.model.named_parameters():
        assert type(parameter.data) is torch.Tensor and torch.equal(parameter, before[name])
        assert parameter.grad is None


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that were there at once of those made since it began."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.most = max(self.most, self.live)

        def gone() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_take_no_more_memory_than_training(
    make_recipe: MakeRecipe, tmp_path: Path, checkpointing: bool, batch_size: int
) -> None:
    recipe = make_recipe(
        data={"valid": str(tmp_path / "train.jsonl"), "allow_overlap": True},
        train={"batch_size": batch_size, "gradient_checkpointing": checkpointing},
        eval={"metric": "exact_match"},
    )
    trainer = Trainer(prepare(recipe), tmp_path / "run", {})
    with LiveBytes() as step:
        for _ in trainer._sampler.shapes():
            trainer._step()
    with LiveBytes() as answers:
        trainer._score("exact_match")
    assert 0 < answers.most <= step.most


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("batch_size", [None, 6])
def test_an_evaluation_takes_no_more_memory_than_training(
    make_recipe: MakeRecipe, tmp_path: Path, checkpointing: bool, packing: bool, batch_size: int | None
) -> None:
    recipe = make_recipe(
        data={"valid": str(tmp_path / "train.jsonl"), "allow_overlap": True, "packing": packing},
        train={"batch_size": batch_size, "batch_tokens": 512, "gradient_checkpointing": checkpointing},
    )
    trainer = Trainer(prepare(recipe), tmp_path / "run", {})
    with LiveBytes() as step:
        for _ in trainer._sampler.shapes():
            trainer._step()
    with LiveBytes() as evaluation:
        data = trainer._prepared.valid
        assert data is not None and trainer._mean_loss(data, lambda: False) is not None
    assert 0 < evaluation.most <= step.most


def test_a_rehearsal_counts_what_a_real_step_holds(make_recipe: MakeRecipe) -> None:
    prepared = prepare(make_recipe(train={"batch_size": 24}))
    (batch,) = prepared.sampler().next_window()
    with LiveBytes() as real:
        accumulate_gradients(prepared.model, [batch])
    memory = estimate(prepared)
    assert memory.activations + memory.logits == pytest.approx(real.most, rel=0.1)


KINDS = ["lora", "bottleneck", "prefix", "ptuning_v2", "ptuning", "prompt"]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_and_fewer_rows_take_less(make_recipe: MakeRecipe, kind: str) -> None:
    def activations(**train: Any) -> int:
        content = make_recipe(train={"batch_size": 8, **train}).model_dump()
        return estimate(prepare(Recipe.model_validate({**content, "method": {"kind": kind}}))).activations

    whole = activations()
    assert 0 < activations(gradient_checkpointing=True) < whole
    assert 0 < activations(batch_size=2) < whole


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_too_large_is_refused_before_it_is_allocated(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    field = {"lora": "r", "bottleneck": "bottleneck_size"}.get(kind, "num_virtual_tokens")
    monkeypatch.setattr("peftkit.train.adapter_size.free_memory", lambda device: 3_000_000)
    monkeypatch.setattr("peftkit.train.prepare.attach", None)
    recipe = Recipe.model_validate({**make_recipe().model_dump(), "method": {"kind": kind, field: 16384}})
    with pytest.raises(RecipeError, match=rf"method\.{field}: 16384 makes an adapter of [\d.]+ GB .*{field} \d+ would"):
        dry_run(recipe)


@pytest.mark.parametrize("room", [0.9, 0.6, 0.4])
def test_a_run_that_wont_fit_is_refused_with_a_change_that_would(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    recipe = make_recipe(train={"batch_size": 24, "max_steps": 1, "gradient_checkpointing": False})
    plan = dry_run(recipe)
    assert plan.wont_fit is None
    least = plan.memory_total - plan.memory.activations - plan.memory.logits
    available = int(least + room * (plan.memory_total - least))
    process = plan.memory.process
    real = peftkit.train.memory.estimate_memory
    for module in ("fit", "dry_run"):
        monkeypatch.setattr(sys.modules[f"peftkit.train.{module}"], "available_memory", lambda device: available)
    monkeypatch.setattr(  # the process grows while the tests run
        "peftkit.train.fit.estimate_memory", lambda *args, **kwargs: replace(real(*args, **kwargs), process=process)
    )
    reason = dry_run(recipe).wont_fit
    assert reason is not None and reason.startswith("will not fit: ")
    changes = dict(change.split("=") for change in reason.partition("it would with ")[2].split())
    with pytest.raises(InputError, match="will not fit"):
        train(recipe)
    assert not Path(recipe.out).exists()
    settings = {key.removeprefix("train."): yaml.safe_load(value) for key, value in changes.items()}
    changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=settings)})
    assert dry_run(changed).wont_fit is None
    assert changed.train.batch_size is not None
    assert changed.train.batch_size * changed.train.grad_accum == 24
