"""What is computed a second time: the same losses and gradients at every level, and the level that fits."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

import peftkit.train.fit
import peftkit.train.memory
from peftkit.data import Batch, Sample, collate, collate_packed
from peftkit.errors import RecipeError
from peftkit.methods import attach
from peftkit.recipe import Recipe
from peftkit.train import dry_run, train
from peftkit.train.fit import choose_recompute, estimate
from peftkit.train.loop import accumulate_gradients
from peftkit.train.prepare import Prepared, prepare
from peftkit.train.recompute import Recompute, decoder_layers, run_twice, set_recompute

MakeRecipe = Callable[..., Recipe]

LEVELS = [
    Recompute("full"),
    Recompute("offload"),
    Recompute("selective"),
    Recompute("selective", 2),
    Recompute("selective", 3),
]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "dropout": 0.2},
    "dora": {"kind": "lora", "r": 4, "variant": "dora"},
    "bottleneck": {"bottleneck_size": 8, "dropout": 0.2},
    "prefix": {"num_virtual_tokens": 3},
    "ptuning_v2": {"num_virtual_tokens": 3},
    "ptuning": {"num_virtual_tokens": 3},
    "prompt": {"num_virtual_tokens": 3},
}
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip


def adapted(name: str, seed: int) -> PreTrainedModel:
    """A random model with an adapter that is nowhere zero."""
    torch.manual_seed(seed)
    recipe = Recipe.model_validate({"method": {"kind": name, **METHODS[name]}, "data": {"train": "x"}})
    model = attach(LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False), recipe.methods[0], seed=seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    return model.train()


def batch(packed: bool) -> Batch:
    lengths = [5, 11, 7, 9]
    ids = [torch.randint(97, (length,)).numpy().astype("int32") for length in lengths]
    samples = [Sample("", row, torch.arange(len(row)).numpy() > 0) for row in ids]
    return collate_packed([samples[:2], samples[2:]]) if packed else collate(samples)


def step(model: PreTrainedModel, rows: Batch) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one micro-batch, dropout drawn alike each time."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(0)
    loss = accumulate_gradients(model, [rows])
    return loss, [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(METHODS))
def test_no_level_changes_a_bit_of_loss_or_gradients(seed: int, name: str, packed: bool) -> None:
    model = adapted(name, seed)
    rows = batch(packed)
    loss, grads = step(model, rows)
    assert len(grads) == sum(parameter.requires_grad for parameter in model.parameters())
    for recompute in (*LEVELS, Recompute()):
        set_recompute(model, recompute)
        again, others = step(model, rows)
        assert again == loss, recompute
        assert all(torch.equal(one, other) for one, other in zip(grads, others, strict=True)), recompute


def test_a_second_pass_can_be_made_again_and_draws_the_same_numbers(seed: int) -> None:
    layer = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 4))
    x = torch.randn(3, 6, requires_grad=True)
    torch.manual_seed(seed)
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.manual_seed(seed)
    loss = run_twice(layer, x).square().sum()
    following = torch.rand(4)
    for retain in (True, True, False):
        torch.manual_seed(seed + 1)
        found = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=retain)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        drawn = torch.rand(4)
        torch.manual_seed(seed + 1)
        assert torch.equal(drawn, torch.rand(4)) and not torch.equal(drawn, following)


def test_nothing_of_a_pass_outlives_its_graph(seed: int) -> None:
    layer, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(3, 6, requires_grad=True)
    made: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        h = layer[1](layer[0](x))
        made.append(weakref.ref(h))
        return layer[2](h)

    gc.disable()
    try:
        loss = run_twice(forward, x).sum()
        loss.backward()
        assert len(made) == 2 and all(one() is None for one in made)
    finally:
        gc.enable()


def test_a_layer_that_has_changed_in_between_is_refused(seed: int) -> None:
    layer, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(3, 6, requires_grad=True)
    loss = run_twice(layer, x).sum()
    layer[0] = nn.Linear(6, 7)
    layer[2] = nn.Linear(7, 4)
    with pytest.raises(RuntimeError, match="when computed again"):
        loss.backward()
    loss = run_twice(layer, x).sum()
    del layer[1:]
    with pytest.raises(RuntimeError, match="when computed again"):
        loss.backward()
    x = x * 2.0
    loss = run_twice(layer, x).square().sum()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recompute", "attentions", "gates"),
    [
        (Recompute(), 3, 3),
        (Recompute("full"), 6, 6),
        (Recompute("selective"), 3, 6),
        (Recompute("selective", 1), 3, 5),
        (Recompute("selective", 3), 3, 3),
    ],
)
def test_each_level_computes_again_what_it_says(seed: int, recompute: Recompute, attentions: int, gates: int) -> None:
    model = adapted("lora", seed)
    set_recompute(model, recompute)
    with Calls() as calls:
        step(model, batch(packed=False))
    assert calls.count["_scaled_dot_product_flash_attention_for_cpu.default"] == attentions
    assert calls.count["silu.default"] == gates


def test_layers_take_no_memory_that_a_lower_level_saves(make_recipe: MakeRecipe) -> None:
    prepared = prepare(make_recipe(train={"batch_size": 24}))
    needed = []
    for recompute in (Recompute(), Recompute("selective"), Recompute("full")):
        set_recompute(prepared.model, recompute)
        needed.append(estimate(prepared).activations)
    assert needed[0] > needed[1] > needed[2] > 0


@pytest.mark.parametrize(("said", "level"), [(True, "full"), (False, "none"), ("full", "full"), ("none", "none")])
def test_true_and_false_are_full_and_none(make_recipe: MakeRecipe, said: bool | str, level: str) -> None:
    assert dry_run(make_recipe(train={"gradient_checkpointing": said})).recompute == level


def room_for(prepared: Prepared, share: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes so large a share of the way from full to none available; gives the bytes."""
    real = peftkit.train.memory.estimate_memory
    process = estimate(prepared).process
    monkeypatch.setattr(  # the process grows while the tests run
        "peftkit.train.fit.estimate_memory", lambda *args, **kwargs: replace(real(*args, **kwargs), process=process)
    )
    totals = []
    for recompute in (Recompute("full"), Recompute()):
        set_recompute(prepared.model, recompute)
        totals.append(estimate(prepared).total)
    room = int(totals[0] + share * (totals[1] - totals[0]))
    available = int(room / peftkit.train.fit._FILLED) + 1
    monkeypatch.setattr("peftkit.train.fit.available_memory", lambda device: available)
    return room


@pytest.fixture
def deep(make_recipe: MakeRecipe) -> Prepared:
    """A run whose base has five layers."""
    prepared = prepare(make_recipe(train={"batch_size": 24}))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 5, "vocab_size": 300}))
    attach(model.requires_grad_(False), prepared.recipe.methods[0])
    return replace(prepared, model=model.train())


@pytest.mark.parametrize("share", [-0.1, 0.5, 1.02])
def test_auto_computes_least_again_of_what_fits(deep: Prepared, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    room = room_for(deep, share, monkeypatch)
    chosen = choose_recompute(deep)
    assert not any(layer.gradient_checkpointing for layer in decoder_layers(deep.model))
    if share > 1:
        assert chosen == Recompute()
    elif share < 0:
        assert chosen == Recompute("full")
    else:
        assert chosen.level == "selective" and 0 < chosen.whole < 5
        for whole, fits in ((chosen.whole, True), (chosen.whole + 2, False)):
            set_recompute(deep.model, Recompute("selective", whole))
            assert (estimate(deep).total <= room) is fits


def test_selective_keeps_as_many_layers_whole_as_fit(deep: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = deep.recipe.train.model_copy(update={"gradient_checkpointing": "selective"})
    asked = replace(deep, recipe=deep.recipe.model_copy(update={"train": settings}))
    assert choose_recompute(asked) == Recompute("selective", 5)
    room_for(deep, 0.5, monkeypatch)
    assert 0 < choose_recompute(asked).whole < 5
    room_for(deep, -0.5, monkeypatch)
    assert choose_recompute(asked) == Recompute("selective")


def test_auto_never_refuses_a_base_that_cannot_compute_again(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.LlamaPreTrainedModel.supports_gradient_checkpointing", False)
    assert dry_run(make_recipe()).recompute == "none"
    with pytest.raises(RecipeError, match=r"train\.gradient_checkpointing"):
        dry_run(make_recipe(train={"gradient_checkpointing": "selective"}))


def test_a_run_goes_on_with_another_level(make_recipe: MakeRecipe) -> None:
    train(make_recipe(train={"max_steps": 2, "gradient_checkpointing": "full"}))
    summary = train(make_recipe(train={"max_steps": 4, "gradient_checkpointing": "selective"}), resume=True)
    whole = make_recipe(train={"max_steps": 4}, out=f"{make_recipe().out}-whole")
    assert summary.uid == train(whole).uid


def test_a_level_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"gradient_checkpointing"):
        Recipe.model_validate({"train": {"gradient_checkpointing": "some"}, "data": {"train": "x"}})


def test_a_base_with_sliding_windows_has_layers_to_compute_again() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8))
    assert len(decoder_layers(model)) == 3


@pytest.mark.gpu
def test_offloaded_inputs_come_back_bit_for_bit_and_take_no_room_on_the_device(seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 12})
    config._attn_implementation = "eager"  # a fused attention's gradients may differ from run to run
    model: Any = LlamaForCausalLM(config)
    model.to("cuda", torch.bfloat16).requires_grad_(False)
    attach(model, Recipe.model_validate({"method": {"kind": "lora", "r": 4}, "data": {"train": "x"}}).methods[0])
    model.train()
    peaks: dict[str, int] = {}
    found: dict[str, tuple[float, list[Tensor]]] = {}
    ids = torch.randint(97, (4, 32, 128))
    for recompute in (Recompute("full"), Recompute("offload")):
        set_recompute(model, recompute)
        for length in (2048, 4096, 4096, 1024):  # memory on the host is used again, for other sizes too
            rows = ids.flatten()[:length].repeat(4, 1)
            positions, targets = torch.arange(length).expand(4, -1), 4 * (length - 1)
            whole = Batch(rows, torch.ones_like(rows), positions, rows, 4 * length, targets)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss, grads = step(model, whole)
            key = f"{length}"
            peak = torch.cuda.max_memory_allocated()
            if recompute.level == "full":
                found[key], peaks[key] = (loss, [grad.clone() for grad in grads]), peak
                continue
            assert loss == found[key][0]
            assert all(torch.equal(one, other) for one, other in zip(grads, found[key][1], strict=True))
            assert peak < peaks[key]
