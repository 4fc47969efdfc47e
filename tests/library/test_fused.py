"""The fused forwards against the modules' own: outputs, gradients, training, and what is left to the modules."""

import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from peftkit.data.sampler import Shape
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    MethodConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    attach,
    attached,
    detach,
    fast_share,
    fuse,
    holding,
    unfuse,
)
from peftkit.methods.attention import attend_by_bounds
from peftkit.methods.frozen import Reader
from peftkit.recipe import Recipe
from peftkit.train import prepare, train
from peftkit.train.rehearsal import rehearse

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}

MODULES, MASKED = 14 + 5 + 2 + 2 + 1, 14 + 5 + 2 + 1
"""Linear layers, norms, gates, attentions and the head of two layers: all, and those on the fast path on a CPU."""
WHOLE_ENDS = "1 of 5 norms (trained whole), 1 of 1 output heads (trained whole)"

BASES: dict[str, Callable[[int | None], PreTrainedModel]] = {
    "llama": lambda _: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral": lambda window: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window, head_dim=8)),
    "qwen2": lambda window: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=window is not None, sliding_window=window, max_window_layers=1)
    ),
    "qwen3": lambda _: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
}

CONFIGS: list[MethodConfig] = [
    LoraConfig(r=4, alpha=8),
    LoraConfig(r=4, alpha=8, variant="rslora", targets=["q_proj", "v_proj", "down_proj"], rank_pattern={"v_proj": 2}),
    LoraConfig(r=4, alpha=8, variant="dora"),
    LoraConfig(r=4, alpha=8, init="pissa"),
    LoraConfig(r=4, alpha=8, lora_bias=True, targets=["k_proj", "o_proj", "up_proj", "lm_head"]),
    LoraConfig(r=4, alpha=8, targets=["embed_tokens", "gate_proj"], modules_to_save=["1.mlp.up_proj", "norm"]),
    LoraConfig(r=4, alpha=8, trainable_token_indices=[7, 2, 96]),
    BottleneckConfig(bottleneck_size=6),
    BottleneckConfig(variant="pfeiffer", bottleneck_size=6, ln_before=True),
    BottleneckConfig(variant="parallel", bottleneck_size=6),
    PrefixTuningConfig(num_virtual_tokens=5),
    PTuningV2Config(num_virtual_tokens=5),
    PTuningConfig(num_virtual_tokens=5),
    PromptTuningConfig(num_virtual_tokens=5),
]


def name_of(config: MethodConfig) -> str:
    used = config.model_dump(exclude_defaults=True, exclude={"r", "alpha", "num_virtual_tokens", "bottleneck_size"})
    return "-".join([config.kind, *(str(value) for value in used.values())])


def a_model(base: str, config: MethodConfig, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    window = None if config.kind in ("ptuning", "prompt") else 9
    model = BASES[base](window).to(dtype).requires_grad_(False)
    model = attach(model, config, seed=seed).train()
    torch.manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.requires_grad:  # nothing is left at zero
            parameter.data.add_(torch.randn_like(parameter) * 0.02)
    return model


def a_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 97, (3, 14), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def loss_and_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]], limit: float
) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=limit, atol=0)
    assert found[1].keys() == wanted[1].keys()
    whole = torch.stack([gradient.norm() for gradient in wanted[1].values()]).norm()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= limit * torch.maximum(gradient.norm(), 1e-2 * whole), name


@pytest.mark.parametrize(
    ("base", "config"),
    [("llama", config) for config in CONFIGS]
    + [(base, CONFIGS[index]) for base in list(BASES)[1:] for index in (0, 2, 8, 11)],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_loss_and_gradients_are_those_of_the_modules(seed: int, base: str, config: MethodConfig) -> None:
    model, batch = a_model(base, config, seed), a_batch(seed)
    wanted = loss_and_gradients(model, batch)
    fuse(model)
    assert_same(loss_and_gradients(model, batch), wanted, 1e-5)
    unfuse(model)
    torch.testing.assert_close(loss_and_gradients(model, batch)[0], wanted[0], rtol=0, atol=0)


@pytest.mark.parametrize("config", [CONFIGS[index] for index in (0, 2, 3, 5, 7, 9, 10, 11, 12, 13)], ids=name_of)
def test_twenty_steps_lose_what_the_modules_do(seed: int, config: MethodConfig) -> None:
    losses: list[list[float]] = []
    for fused in (False, True):
        model = a_model("llama", config, seed)
        if fused:
            fuse(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        losses.append([])
        for step in range(20):
            optimizer.zero_grad()
            loss = model(**a_batch(seed + step % 4), use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("base", "variant"), [("llama", "plain"), ("qwen3", "dora")])
def test_bfloat16_stays_near_for_twenty_steps(seed: int, base: str, variant: Any) -> None:
    losses: list[list[float]] = []
    for fused in (False, True):
        model = a_model(base, LoraConfig(r=4, alpha=8, variant=variant), seed, torch.bfloat16)
        if fused:
            fuse(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(**a_batch(seed), use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-2, atol=0)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[7], CONFIGS[10]], ids=name_of)
def test_checkpointing_changes_nothing(seed: int, config: MethodConfig) -> None:
    model, batch = a_model("llama", config, seed), a_batch(seed)
    fuse(model)
    wanted = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(loss_and_gradients(model, batch), wanted, 1e-7)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[3]], ids=name_of)
def test_gradients_pass_through_ddp(seed: int, config: MethodConfig, tmp_path: Path) -> None:
    model, batch = a_model("llama", config, seed), a_batch(seed)
    wanted = loss_and_gradients(model, batch)[1]
    fuse(model)
    model.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        DistributedDataParallel(model)(**batch, use_cache=False).loss.backward()
    finally:
        torch.distributed.destroy_process_group()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_checkpointing_drops_the_same_inputs_again(seed: int) -> None:
    model, batch = a_model("llama", LoraConfig(r=4, alpha=8, dropout=0.3), seed), a_batch(seed)
    fuse(model)
    torch.manual_seed(seed)
    wanted = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(seed)
    assert_same(loss_and_gradients(model, batch), wanted, 1e-7)


@pytest.mark.parametrize("variant", ["plain", "dora"])
def test_checkpointing_does_not_multiply_again_by_a_layers_last_weight(
    seed: int, variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = a_model("llama", LoraConfig(r=4, alpha=8, variant=variant), seed), a_batch(seed)
    fuse(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    read: list[int] = []
    dense = Reader.dense

    def counted(one: Reader, *args: Any) -> Tensor:
        read.append(one.weight.data_ptr())
        return dense(one, *args)

    monkeypatch.setattr(Reader, "dense", counted)
    loss = model(**batch, use_cache=False).loss
    forward = len(read)
    loss.backward()
    layer: Any = model.base_model.layers[1]
    times = {"plain": (2, 3), "dora": (3, 3)}[variant]
    assert forward == 14
    assert (read.count(layer.mlp.down_proj.weight.data_ptr()), read.count(layer.mlp.up_proj.weight.data_ptr())) == times


def test_detaching_gives_the_base_back(seed: int) -> None:
    model, batch = a_model("qwen3", LoraConfig(r=4, alpha=8), seed), a_batch(seed)
    fuse(model)
    detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert fast_share(model) is None
    torch.manual_seed(seed)
    torch.testing.assert_close(model(**batch).logits, BASES["qwen3"](None).train()(**batch).logits, rtol=0, atol=0)


def test_a_cache_goes_through_the_modules_own_forward(seed: int) -> None:
    model = a_model("mistral", LoraConfig(r=4, alpha=8), seed).eval()
    ids = torch.randint(1, 97, (2, 12))
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    fuse(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), wanted)


def test_hooks_and_wrapped_modules_hold(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = a_model("llama", LoraConfig(r=4, alpha=8, targets=["q_proj"]), seed), a_batch(seed)
    layer: Any = model.base_model.layers[0]
    called: list[str] = []
    layer.self_attn.register_forward_hook(lambda *_: called.append("attention"))
    layer.self_attn.k_proj.register_forward_hook(lambda *_: called.append("k"))
    layer.post_attention_layernorm.register_forward_pre_hook(lambda *_: called.append("norm"))
    wanted = loss_and_gradients(model, batch)
    assert called == ["k", "attention", "norm"]
    with caplog.at_level(logging.INFO, "peftkit"):
        fuse(model)
    assert caplog.messages == ["off the fast path: 1 of 14 linear layers (with a hook), 1 of 5 norms (with a hook)"]
    assert fast_share(model) == pytest.approx((MASKED - 2) / MODULES)
    assert_same(loss_and_gradients(model, batch), wanted, 1e-5)
    assert called == ["k", "attention", "norm"] * 2


def test_what_a_step_looks_up_the_next_one_looks_up_again(seed: int) -> None:
    model, batch = a_model("llama", CONFIGS[0], seed), a_batch(seed)
    fuse(model)
    layer: Any = model.base_model.layers[0]
    called: list[str] = []

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        with holding(model):
            loss_and_gradients(model, batch)
            return loss_and_gradients(model, batch)

    wanted = step()
    handle = layer.self_attn.k_proj.register_forward_hook(lambda *_: called.append("k"))
    layer.post_attention_layernorm.register_forward_hook(lambda *_: called.append("norm"))
    assert_same(step(), wanted, 1e-5)
    assert called == ["k", "norm"] * 2
    handle.remove()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(1.5)  # as fused optimisers do, unseen by autograd
    found = step()
    unfuse(model)
    assert_same(found, loss_and_gradients(model, batch), 1e-5)
    detach(model)
    torch.manual_seed(seed)
    model = attach(model, CONFIGS[1], seed=seed).train()
    fuse(model)
    found = step()
    unfuse(model)
    assert_same(found, loss_and_gradients(model, batch), 1e-5)


def test_modules_of_another_class_keep_their_forward(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = a_model("llama", LoraConfig(r=4, alpha=8, targets=["q_proj", "up_proj"]), seed), a_batch(seed)

    class OwnMLP(type(model.base_model.layers[0].mlp)):  # type: ignore[misc]
        pass

    wanted = loss_and_gradients(model, batch)
    for layer in model.base_model.layers:
        layer.mlp.__class__ = OwnMLP
    with caplog.at_level(logging.INFO, "peftkit"):
        fuse(model)
    assert caplog.messages == ["off the fast path: 4 of 14 linear layers (in OwnMLP), 2 of 2 gates (in OwnMLP)"]
    assert fast_share(model) == pytest.approx((MASKED - 6) / MODULES)
    assert_same(loss_and_gradients(model, batch), wanted, 1e-5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("config", [CONFIGS[index] for index in (0, 2, 7, 10)], ids=name_of)
def test_all_of_a_plain_adapters_base_is_fast_and_nothing_is_said(
    seed: int, base: str, config: MethodConfig, caplog: pytest.LogCaptureFixture, everywhere: None
) -> None:
    model = BASES[base](None).requires_grad_(False)
    attend_by_bounds(model)
    attach(model, config, seed=seed)
    assert fast_share(model) is None
    with caplog.at_level(logging.INFO, "peftkit"):
        fuse(model)
    assert fast_share(model, longest=14) == 1.0 and not caplog.messages


@pytest.mark.parametrize(
    ("config", "said", "left"),
    [
        (CONFIGS[4], "1 of 1 output heads (adapted)", 1),
        (CONFIGS[5], "1 of 14 linear layers (trained whole), 5 of 5 norms (trained whole)", 6),
        (LoraConfig(r=4, modules_to_save=["lm_head", "0.input_layernorm"]), WHOLE_ENDS, 2),
        (CONFIGS[8], "2 of 5 norms (with a hook)", 2),
    ],
    ids=lambda value: value if isinstance(value, (str, int)) else name_of(value),
)
def test_what_an_adapter_leaves_out_is_counted_and_said(
    seed: int, config: MethodConfig, said: str, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model("llama", config, seed)
    with caplog.at_level(logging.INFO, "peftkit"):
        fuse(model)
    assert caplog.messages == [f"off the fast path: {said}"]
    assert fast_share(model) == pytest.approx((MASKED - left) / MODULES)


def test_a_biased_head_an_unknown_activation_and_a_norm_in_another_type_are_said(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")).requires_grad_(False)
    model.lm_head = nn.Linear(32, 97).requires_grad_(False)
    model.base_model.norm.double()
    with caplog.at_level(logging.INFO, "peftkit"):
        fuse(model)
    said = "1 of 5 norms (that compute in float64), 2 of 2 gates (of relu), 1 of 1 output heads (with a bias)"
    assert caplog.messages == [f"off the fast path: {said}"]
    assert fast_share(model) == pytest.approx((MASKED - 4) / MODULES)


def test_attention_counts_where_the_longest_row_goes_by_bounds(everywhere: None) -> None:
    model = BASES["mistral"](9).requires_grad_(False)
    attend_by_bounds(model)
    fuse(model)
    assert fast_share(model, longest=9) == 1.0
    assert fast_share(model, longest=10) == pytest.approx(MASKED / MODULES)


def test_gate_and_up_are_overwritten_unless_dora_needs_them(seed: int) -> None:
    sizes: dict[str, int] = {}
    for variant in ("plain", "dora"):
        model, batch = a_model("llama", LoraConfig(r=4, alpha=8, variant=variant), seed), a_batch(seed)  # type: ignore[arg-type]
        fuse(model)
        held: list[Tensor] = []

        def keep(tensor: Tensor, held: list[Tensor] = held) -> Tensor:
            held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch, use_cache=False).loss
        wide = [tensor for tensor in held if tensor.numel() == 3 * 14 * 2 * 48]
        before = [tensor.detach().clone() for tensor in wide]
        loss.backward()
        sizes[variant] = sum(not torch.equal(tensor.detach(), one) for tensor, one in zip(wide, before, strict=True))
    assert sizes["plain"] == 2 and sizes["dora"] == 0


def test_two_methods_run_fused_together(seed: int) -> None:
    model, batch = a_model("qwen2", LoraConfig(r=4, alpha=8), seed), a_batch(seed)
    model = attach(model, PTuningV2Config(num_virtual_tokens=4), seed=seed)
    assert len(attached(model)) == 2
    wanted = loss_and_gradients(model, batch)
    fuse(model)
    assert_same(loss_and_gradients(model, batch), wanted, 1e-5)


def test_an_activation_that_is_not_known_is_computed_by_the_module(seed: int) -> None:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")).requires_grad_(False)
    model, batch = attach(model, LoraConfig(r=4, alpha=8)).train(), a_batch(seed)
    assert isinstance(model, nn.Module)
    wanted = loss_and_gradients(model, batch)
    fuse(model)
    assert_same(loss_and_gradients(model, batch), wanted, 1e-5)


@pytest.mark.parametrize(("quantised", "variant"), [(False, "plain"), (True, "plain"), (True, "dora")])
def test_a_step_can_be_rehearsed_and_takes_less(seed: int, quantised: bool, variant: Any) -> None:
    torch.manual_seed(seed)
    model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "hidden_size": 64, "intermediate_size": 256}))
    model.to(torch.bfloat16)  # of which the modules' own LoRA makes float32 copies
    if quantised:
        for layer in model.base_model.layers:
            for block in (layer.self_attn, layer.mlp):
                for name, linear in list(block.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(block, name, nf4(linear))
    model.requires_grad_(False)
    # without dropout, whose reference on a CPU hashes each element's place in 64 bits
    model = attach(model, LoraConfig(r=4, alpha=8, variant=variant)).train()
    own = rehearse(model, Shape(rows=8, length=200, tokens=1600, targets=1500), packed=False)
    fuse(model)
    fused = rehearse(model, Shape(rows=8, length=200, tokens=1600, targets=1500), packed=False)
    assert 0 < fused.activations < 0.9 * own.activations
    assert loss_and_gradients(model, a_batch(seed))[0].isfinite()


def nf4(linear: nn.Linear) -> nn.Module:
    layer = Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    layer.support_avx512bf16_for_cpu = False
    layer.weight.data = linear.weight.detach().clone()
    return layer.to("cpu")


@pytest.mark.parametrize(("variant", "quant"), [("plain", "nf4"), ("dora", "none")])
def test_a_run_loses_the_same_through_it(
    make_recipe: Callable[..., Recipe], tmp_path: Path, variant: str, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float | None] = []
    packing = prepare._packing
    for name in ("own", "fused"):
        if name == "fused":  # on a CPU it isn't taken by itself
            monkeypatch.setattr(prepare, "_packing", lambda model, *rest: (fuse(model), packing(model, *rest))[1])
        summary = train(make_recipe(method={"variant": variant}, quant={"kind": quant}, out=str(tmp_path / name)))
        losses.append(summary.train_loss)
        assert summary.fast_share == (pytest.approx(MASKED / MODULES) if name == "fused" else None)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("kind", ["lora", "bottleneck", "prefix"])
@pytest.mark.parametrize("quant", ["nf4", "none"])
def test_a_base_goes_with_its_run(
    make_recipe: Callable[..., Recipe], quant: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[weakref.ref[Tensor]] = []
    packing = prepare._packing

    def fused(model: PreTrainedModel, *rest: Any) -> bool:  # on a CPU it isn't by itself
        weights.extend(weakref.ref(weight) for weight in model.parameters())
        fuse(model)
        return packing(model, *rest)

    monkeypatch.setattr(prepare, "_packing", fused)
    method = {"kind": "lora", "targets": ["v_proj"]} if kind == "lora" else {"kind": kind}
    recipe = make_recipe(quant={"kind": quant}, train={"max_steps": 2}).model_dump()
    assert train(Recipe.model_validate({**recipe, "method": method})).fast_share == pytest.approx(MASKED / MODULES)
    gc.collect()
    assert weights and not any(weight() is not None for weight in weights)


@pytest.mark.parametrize("quantised", [True, False])
def test_an_adapter_goes_when_it_is_detached(seed: int, quantised: bool) -> None:
    model, batch = a_model("llama", LoraConfig(r=4, alpha=8, targets=["v_proj", "up_proj"]), seed), a_batch(seed)
    if quantised:
        for layer in model.base_model.layers:
            layer.self_attn.q_proj = nf4(layer.self_attn.q_proj).requires_grad_(False)
    adapter = [weakref.ref(parameter) for parameter in model.parameters() if parameter.requires_grad]
    fuse(model)
    with holding(model):
        loss_and_gradients(model, batch)
    detach(model)
    gc.collect()
    assert len(adapter) == 8 and not any(parameter() is not None for parameter in adapter)


def test_adapters_in_turn_on_one_base_each_have_their_own(seed: int) -> None:
    model, batch = a_model("llama", CONFIGS[0], seed), a_batch(seed)
    fuse(model)
    loss_and_gradients(model, batch)
    for config in (CONFIGS[2], CONFIGS[1], CONFIGS[0]):
        detach(model)
        torch.manual_seed(seed)
        model = attach(model, config, seed=seed + 1).train()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) * 0.02)
        wanted = loss_and_gradients(model, batch)
        fuse(model)
        for _ in range(2):
            assert_same(loss_and_gradients(model, batch), wanted, 1e-5)
        rehearse(model, Shape(rows=2, length=10, tokens=20, targets=18), packed=False)
        assert_same(loss_and_gradients(model, batch), wanted, 1e-5)
