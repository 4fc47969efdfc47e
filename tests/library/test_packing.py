"""Packed rows: what a sample's loss is, what it is not touched by, how much padding is left, and who refuses."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from peftkit.data import Batching, Sample, Sampler, collate, collate_packed, padding_share
from peftkit.data.packing import fill_rows, why_not
from peftkit.errors import RecipeError
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    attach,
    attached,
)
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
from peftkit.train.interrupt import Interrupted
from peftkit.train.loop import Trainer, accumulate_gradients
from peftkit.train.loss import token_loss_sum
from peftkit.train.prepare import prepare

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
METHODS: dict[str, Any] = {
    "none": None,
    "lora": LoraConfig(r=4),
    "dora": LoraConfig(r=4, variant="dora"),
    "token rows": LoraConfig(r=4, trainable_token_indices=[3, 9]),
    "bottleneck": BottleneckConfig(),
    "prefix": PrefixTuningConfig(num_virtual_tokens=3),
    "ptuning_v2": PTuningV2Config(num_virtual_tokens=3),
    "prompt": PromptTuningConfig(num_virtual_tokens=3),
    "ptuning": PTuningConfig(num_virtual_tokens=3),
}


def model_of(family: str = "llama", *, attention: str = "sdpa", **settings: Any) -> PreTrainedModel:
    config = FAMILIES[family](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        **{"sliding_window": None, **settings} if family == "mistral" else settings,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def adapt(model: PreTrainedModel, method: Any, seed: int) -> None:
    """Attaches a method whose parameters all differ from their start, so that each has an effect."""
    if method is None:
        model.requires_grad_(False)
        model.get_input_embeddings().requires_grad_(True)
        return
    attach(model, method, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in attached(model):
            for parameter in part.parameters().values():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def samples_of(rng: random.Random, count: int, *, vocabulary: int = 64) -> list[Sample]:
    samples = []
    for index in range(count):
        ids = np.array([rng.randrange(vocabulary) for _ in range(rng.randint(2, 14))], dtype=np.int32)
        trained = np.array([position > 0 and rng.random() < 0.7 for position in range(len(ids))])
        trained[-1] = True
        samples.append(Sample(f"rows:{index}", ids, trained))
    return samples


def only(samples: list[Sample], chosen: int) -> list[Sample]:
    """The same samples, of which one alone is trained."""
    return [
        sample if index == chosen else Sample(sample.where, sample.ids, np.zeros_like(sample.trained))
        for index, sample in enumerate(samples)
    ]


def packed_losses(model: PreTrainedModel, samples: list[Sample], rows: list[list[int]]) -> Tensor:
    """Each sample's summed loss with all of them packed."""
    losses = []
    for chosen in range(len(samples)):
        marked = only(samples, chosen)
        losses.append(token_loss_sum(model, collate_packed([[marked[index] for index in row] for row in rows])))
    return torch.stack(losses)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", METHODS)
def test_each_samples_loss_is_what_it_is_alone(method: str, attention: str, seed: int) -> None:
    model = model_of(attention=attention)
    adapt(model, METHODS[method], seed)
    model.eval()
    samples = samples_of(random.Random(seed), 7)
    rows = fill_rows(range(7), [len(sample.ids) for sample in samples], 24)
    assert max(len(row) for row in rows) > 1
    with torch.no_grad():
        alone = torch.stack([token_loss_sum(model, collate([sample])) for sample in samples])
        packed = packed_losses(model, samples, rows)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_keeps_packed_rows_apart(family: str, seed: int) -> None:
    model = model_of(family).eval()
    assert why_not(model, 64) is None
    samples = samples_of(random.Random(seed), 5)
    with torch.no_grad():
        alone = torch.stack([token_loss_sum(model, collate([sample])) for sample in samples])
        packed = packed_losses(model, samples, [[3, 0, 4], [1, 2]])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_changing_one_sample_never_changes_its_neighbours_loss(method: str, seed: int) -> None:
    model = model_of()
    adapt(model, METHODS[method], seed)
    model.eval()
    rng = random.Random(seed)
    samples = samples_of(rng, 4)
    rows = [[0, 1, 2], [3]]
    with torch.no_grad():
        before = packed_losses(model, samples, rows)
        for changed in range(4):
            other = list(samples)
            ids = np.array([(token + rng.randint(1, 63)) % 64 for token in samples[changed].ids], dtype=np.int32)
            other[changed] = Sample("other", ids, samples[changed].trained)
            after = packed_losses(model, other, rows)
            kept = [index for index in range(4) if index != changed]
            torch.testing.assert_close(after[kept], before[kept], rtol=1e-6, atol=1e-6)
            assert not torch.allclose(after[changed], before[changed])


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_padded_rows(method: str, seed: int) -> None:
    model = model_of().double()
    adapt(model, METHODS[method], seed)
    model.eval()
    samples = samples_of(random.Random(seed), 6)
    gradients = []
    for batch in (collate(samples), collate_packed([[samples[i] for i in row] for row in ([0, 1, 2], [3, 4], [5])])):
        model.zero_grad()
        accumulate_gradients(model, [batch])
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    padded, packed = gradients
    assert padded.norm() > 0
    # prefixes and prompts are float32 in a float64 model
    assert (packed - padded).norm() <= 1e-6 * padded.norm()


def test_a_packed_row_restarts_positions_and_predicts_nothing_across_samples() -> None:
    first = Sample("a", np.array([5, 6, 7], dtype=np.int32), np.array([False, True, True]))
    second = Sample("b", np.array([8, 9], dtype=np.int32), np.array([False, True]))
    batch = collate_packed([[first, second], [second]])
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9], [8, 9, 0, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    assert batch.labels_BT.tolist() == [[-100, 6, 7, -100, 9], [-100, 9, -100, -100, -100]]
    assert batch.segments_BT is not None
    assert batch.segments_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert (batch.num_tokens, batch.num_positions, batch.num_target_tokens) == (7, 10, 4)


# rows ----------------------------------------------------------------------------------------------------------------


def test_rows_hold_each_sample_once_within_their_width(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 70) for _ in range(200)]
    rows = fill_rows(range(200), lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(200))
    for row in rows:
        assert len(row) == 1 or sum(lengths[index] for index in row) <= 64


@pytest.mark.parametrize("batch_size", [None, 8])
def test_an_epochs_plan_is_one_of_its_seed_and_holds_each_sample_once(batch_size: int | None, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 60) for _ in range(150)]

    def plan(seed: int, epoch: int) -> list[list[list[int]]]:
        return Batching(seed, 256, batch_size, 64).plan(lengths, str(epoch))

    assert plan(seed, 0) == plan(seed, 0)
    assert plan(seed, 0) != plan(seed, 1) and plan(seed, 0) != plan(seed + 1, 0)
    assert sorted(i for batch in plan(seed, 0) for row in batch for i in row) == list(range(150))
    if batch_size is None:
        assert all(len(batch) <= 4 for batch in plan(seed, 0))
    else:
        assert all(sum(map(len, batch)) == batch_size for batch in plan(seed, 0)[:-1])


@pytest.mark.parametrize("width", [None, 64])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_windows_are_counted_as_they_are_walked(batch_size: int | None, width: int | None, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 60) for _ in range(rng.randint(1, 150))]
    samples = [Sample("a", np.zeros(length, dtype=np.int32), np.arange(length) > 0) for length in lengths]
    sampler = Sampler(samples, Batching(seed, 256, batch_size, width), window=3)
    counted, walked = sampler.num_windows(3), 0
    while sampler.next_window() and sampler.position.epoch < 3:
        walked += 1
    assert counted == walked


def test_little_padding_is_left(seed: int) -> None:
    rng = random.Random(seed)
    samples = [
        Sample("a", np.zeros(length, dtype=np.int32), np.arange(length) > 0)
        for length in (rng.randint(4, 100) for _ in range(9600))
    ]
    packed, padded = (
        padding_share(Sampler(samples, Batching(seed, 2048, size, width), window=1).shapes())
        for size, width in ((None, 512), (16, None))
    )
    assert packed < 0.05 < 0.3 < padded
    even = padding_share(Sampler(samples, Batching(seed, 2048, 16, 512), window=1).shapes())
    assert even < 0.05


# refusals ------------------------------------------------------------------------------------------------------------


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = model_of()
    model.config._attn_implementation = "flash_attention_2"
    assert "attention 'flash_attention_2' takes no mask" in str(why_not(model, 64))


def test_a_window_that_a_mask_would_undo_is_refused() -> None:
    model = model_of("mistral", sliding_window=16)
    assert "16 tokens back" in str(why_not(model, 32))
    assert why_not(model, 16) is None


def test_layers_that_carry_one_row_over_into_the_next_are_refused() -> None:
    model = model_of()
    trunk: Any = model.base_model
    trunk.layers[0].register_forward_hook(lambda module, args, output: output + output.cumsum(1))
    assert "carry one packed row over" in str(why_not(model, 64))


# runs ----------------------------------------------------------------------------------------------------------------

MakeRecipe = Callable[..., Recipe]


def weights(recipe: Recipe) -> dict[str, Tensor]:
    return load_file(Path(recipe.out) / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt"])
def test_a_packed_run_trains_what_a_padded_run_does(make_recipe: MakeRecipe, tmp_path: Path, kind: str) -> None:
    results = []
    for packing in (True, False):
        recipe = make_recipe(method=METHODS[kind], data={"packing": packing}, out=str(tmp_path / f"run-{packing}"))
        summary = train(recipe)
        assert summary.packed is packing
        results.append((summary, weights(recipe)))
    (packed, one), (padded, other) = results
    assert packed.tokens == padded.tokens
    assert packed.padding < padded.padding
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)


def test_a_packed_run_that_was_interrupted_ends_with_the_same_bits(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "data": {"packing": True},
        "train": {"max_steps": 10, "batch_size": None, "batch_tokens": 160, "grad_accum": 2, "save_every": 4},
    }
    whole = make_recipe(**settings, out=str(tmp_path / "whole"))
    train(whole)
    parted = make_recipe(**settings, out=str(tmp_path / "parted"))
    stop_after(monkeypatch, 5)
    with pytest.raises(Interrupted):
        train(parted)
    monkeypatch.undo()
    train(parted, resume=True)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parted)[name])


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Has a run be interrupted once so many steps are done."""
    done = Trainer._report

    def report(self: Trainer, *args: Any) -> None:
        done(self, *args)
        if self.state.step == steps:
            raise Interrupted("stopped by the test")

    monkeypatch.setattr(Trainer, "_report", report)


def test_packing_that_a_base_cannot_do_is_an_error_where_asked_for_and_padding_where_not(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit.data.packing.MASKED", ())
    with pytest.raises(RecipeError, match=r"data.packing: attention 'sdpa' takes no mask.* set it to false"):
        prepare(make_recipe(data={"packing": True}))
    assert not prepare(make_recipe(data={"packing": "auto"})).packed


def test_the_dry_run_says_how_much_padding_packing_removes(make_recipe: MakeRecipe) -> None:
    packed, padded = (dry_run(make_recipe(data={"packing": packing})) for packing in ("auto", False))
    assert packed.packed and not padded.packed
    assert packed.padding < packed.unpacked_padding == padded.padding


def test_gradients_of_packed_rows_are_the_same_with_checkpointing(seed: int) -> None:
    model = model_of()
    adapt(model, METHODS["prefix"], seed)
    model.train()
    samples = samples_of(random.Random(seed), 5)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        accumulate_gradients(model, [collate_packed([samples[:3], samples[3:]])])
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other)
