"""Merging in memory: the merged weights against the sum written out, and the merged model against base and adapter."""

import shutil
from collections.abc import Callable
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import peftkit
from peftkit.artifact import Artifact, read_adapter, write_adapter
from peftkit.base import Quant, load_base
from peftkit.errors import BaseMismatchError, InputError, RunError, UnsupportedError
from peftkit.merge.delta import Update, merged_weight
from peftkit.methods import (
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PromptTuningConfig,
    PTuningV2Config,
    attach,
    attached,
)

PLAIN = LoraConfig(r=4, alpha=8)
RSLORA = LoraConfig(r=4, alpha=8, targets=["q_proj", "down_proj"], variant="rslora")
PATTERNS = LoraConfig(r=4, alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3})
CONFIGS = {"plain": PLAIN, "rslora": RSLORA, "patterns": PATTERNS}
ENDS = {
    "embedding": LoraConfig(r=4, alpha=8, targets=["embed_tokens", "v_proj"]),
    "output": LoraConfig(r=4, alpha=8, targets=["lm_head", "o_proj"]),
    "both-dora": LoraConfig(r=4, alpha=8, targets=["lm_head", "embed_tokens"], variant="dora"),
    "saved-output": LoraConfig(r=4, alpha=8, modules_to_save=["lm_head", "norm"]),
    "saved-embedding": LoraConfig(r=4, alpha=8, targets=["q_proj"], modules_to_save=["embed_tokens"]),
    "tokens": LoraConfig(r=4, alpha=8, targets=["q_proj"], trainable_token_indices=[70, 9, 101]),
    "tokens-apart": LoraConfig(r=4, alpha=8, trainable_token_indices={"embed_tokens": [70], "lm_head": [9, 101]}),
}
"""Adapters that change a tied base's ends, of which only the token rows of the input embedding leave them tied."""

MakeAdapter = Callable[..., Path]


@pytest.fixture
def base(seed: int, tiny_base: Path, tmp_path: Path) -> Path:
    """The tiny base with fresh weights of the usual spread."""
    folder = shutil.copytree(tiny_base, tmp_path / "base")
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder, initializer_range=0.02)).save_pretrained(folder)
    return folder


@pytest.fixture
def make_adapter(seed: int, base: Path, tmp_path: Path) -> MakeAdapter:
    """Saves a random adapter over the tiny base; its update is about as large as the weights."""

    def make(config: AnyConfig, *, quant: Quant = "none", name: str = "adapter") -> Path:
        model, _ = load_base(base, quant=quant)
        attach(model, config, seed=seed)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.05)
        peftkit.save_adapter(model, tmp_path / name)
        return tmp_path / name

    return make


def logits_with(adapter: Path, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    peftkit.load_adapter(model, adapter)
    with torch.no_grad():
        return model(ids).logits


def some_ids() -> torch.Tensor:
    return torch.randint(3, 259, (3, 40))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def manual_update(artifact: Artifact, path: str, scale: float) -> torch.Tensor:
    prefix = f"base_model.model.{path}.lora_"
    return artifact.tensors[f"{prefix}B.weight"] @ artifact.tensors[f"{prefix}A.weight"] * scale


@pytest.mark.parametrize("quant", ["none", "nf4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_merged_model_gives_the_adapters_logits(name: str, quant: Quant, base: Path, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(CONFIGS[name], quant=quant)
    model, _ = load_base(base, quant=quant)
    ids = some_ids()
    merged = peftkit.merge(model, [adapter])
    rounded = peftkit.merge(model, [adapter], dtype="bfloat16").float()
    with torch.no_grad():
        bare, found, coarse = model(ids).logits, merged(ids).logits, rounded(ids).logits
    wanted = logits_with(adapter, model, ids)
    assert relative(bare, wanted) > 0.02, "an adapter that does something"
    assert relative(found, wanted) < 1e-5
    assert relative(coarse, wanted) < 1e-2


def test_greedy_generation_is_that_of_base_and_adapter(base: Path, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(PLAIN, quant="nf4")
    model, _ = load_base(base, quant="nf4")
    merged = peftkit.merge(model, [adapter])
    peftkit.load_adapter(model, adapter)
    ids = torch.randint(3, 259, (1, 12))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(merged.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_weights_are_those_that_training_multiplied_by_plus_the_update(
    double_quant: bool, base: Path, make_adapter: MakeAdapter
) -> None:
    artifact = read_adapter(make_adapter(LoraConfig(r=4, alpha=8, targets=["q_proj"]), quant="nf4"))
    model, _ = load_base(base, quant="nf4", double_quant=double_quant)
    merged = peftkit.merge(model, [artifact.path])
    stored = load_file(base / "model.safetensors")
    for path, module in model.named_modules():
        if not isinstance(module, bnb.nn.Linear4bit):
            continue
        weight = stored[f"{path}.weight"]
        state = bnb.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=double_quant)
        wanted = bnb.functional.dequantize_4bit(*state)
        # what the layer itself multiplies by: its output for the unit vectors
        assert torch.equal(wanted, module(torch.eye(module.in_features)).T)
        if path.endswith("q_proj"):
            wanted = wanted + manual_update(artifact, path, scale=2.0)
        assert torch.equal(merged.get_submodule(path).weight, wanted), path


@pytest.mark.parametrize("name", CONFIGS)
def test_every_targeted_weight_changes_and_no_other(name: str, base: Path, make_adapter: MakeAdapter) -> None:
    artifact = read_adapter(make_adapter(CONFIGS[name]))
    model, _ = load_base(base)
    merged = dict(peftkit.merge(model, [artifact.path]).named_parameters())
    changed = {path for path, weight in model.named_parameters() if not torch.equal(weight, merged[path])}
    targeted = {f"{key.split('base_model.model.')[1].split('.lora_')[0]}.weight" for key in artifact.tensors}
    assert changed == targeted and len(changed) == len(artifact.tensors) // 2


def test_ranks_and_strengths_of_patterns_reach_their_layers(base: Path, make_adapter: MakeAdapter) -> None:
    artifact = read_adapter(make_adapter(PATTERNS))
    model, _ = load_base(base)
    merged = peftkit.merge(model, [artifact.path])
    scales = {"layers.0.self_attn.k_proj": 8 / 2, "layers.1.self_attn.v_proj": 3 / 4, "layers.1.mlp.up_proj": 8 / 4}
    for end, scale in scales.items():
        path = f"model.{end}"
        wanted = model.get_submodule(path).weight + manual_update(artifact, path, scale)
        torch.testing.assert_close(merged.get_submodule(path).weight.data, wanted, rtol=0, atol=1e-6)


def test_the_sum_is_rounded_once(seed: int) -> None:
    weight = torch.randn(64, 48).to(torch.bfloat16)
    # updates of about half a unit in the last place of the weights
    update = Update(lora_A=torch.randn(2, 48) * 0.03, lora_B=torch.randn(64, 2) * 0.03, scale=2.0)
    exact = weight.double() + 2.0 * update.lora_B.double() @ update.lora_A.double()
    merged = merged_weight("w", weight, update, torch.bfloat16)
    ulp = torch.finfo(torch.bfloat16).eps * exact.abs()
    assert ((merged.double() - exact).abs() <= ulp * 0.5001 + 1e-9).all()
    twice = weight + (update.lora_B @ update.lora_A * update.scale).to(torch.bfloat16)
    assert (merged.double() - exact).norm() <= (twice.double() - exact).norm()


def test_result_is_a_plain_model_and_the_base_is_as_it_was(base: Path, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(PLAIN, quant="nf4")
    model, _ = load_base(base, quant="nf4")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    merged = peftkit.merge(model, [adapter])
    assert type(merged) is LlamaForCausalLM and not merged.training
    assert {type(module).__module__.split(".")[0] for module in merged.modules()} <= {"torch", "transformers"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in merged.modules())
    assert not hasattr(merged.config, "quantization_config") and attached(merged) == []
    assert merged.lm_head.weight is merged.get_input_embeddings().weight
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    shared = {p.data_ptr() for p in merged.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert not shared, "training the result must not move the base"


def test_attached_adapters_take_no_part_and_stay(base: Path, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(PLAIN)
    model, _ = load_base(base)
    alone = peftkit.merge(model, [adapter]).state_dict()
    for other in (make_adapter(RSLORA, name="other"), make_adapter(PromptTuningConfig(num_virtual_tokens=3), name="p")):
        peftkit.load_adapter(model, other)
    beside = peftkit.merge(model, [adapter]).state_dict()
    assert alone.keys() == beside.keys() and all(torch.equal(alone[name], beside[name]) for name in alone)
    assert len(attached(model)) == 2


def test_several_adapters_are_composed_into_one_merge(base: Path, make_adapter: MakeAdapter) -> None:
    model, _ = load_base(base)
    adapters = [make_adapter(PLAIN, name="a"), make_adapter(RSLORA, name="b")]
    merged = peftkit.merge(model, adapters, weights=[0.5, -2])
    artifacts = [read_adapter(adapter) for adapter in adapters]
    path = "model.layers.0.self_attn.q_proj"
    updates = [manual_update(one, path, scale) for one, scale in zip(artifacts, (2.0, 8 / 4**0.5), strict=True)]
    wanted = model.get_submodule(path).weight + 0.5 * updates[0] - 2 * updates[1]
    torch.testing.assert_close(merged.get_submodule(path).weight.data, wanted, rtol=0, atol=1e-5)


def test_no_adapter_is_refused(base: Path) -> None:
    with pytest.raises(InputError, match="no adapters are given"):
        peftkit.merge(load_base(base)[0], [])


@pytest.mark.parametrize(
    "config", [PromptTuningConfig(num_virtual_tokens=3), PTuningV2Config(num_virtual_tokens=3), BottleneckConfig()]
)
def test_what_no_weight_can_hold_is_refused_with_what_to_do_instead(
    config: AnyConfig, base: Path, make_adapter: MakeAdapter
) -> None:
    model, _ = load_base(base)
    with pytest.raises(
        UnsupportedError, match=rf"a {config.kind} adapter can't be .*; serve it unmerged: peftkit serve"
    ):
        peftkit.merge(model, [make_adapter(config)])


def test_an_adapter_for_another_base_is_refused(base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    artifact = read_adapter(make_adapter(PLAIN))
    model, _ = load_base(base)
    fingerprint = {**artifact.record["base"]["fingerprint"], "tokenizer": "0" * 64}
    record = {"base": {"id": "another", "fingerprint": fingerprint}}
    other = write_adapter(tmp_path / "other", artifact.config, artifact.tensors, record)
    with pytest.raises(BaseMismatchError, match="made for another"):
        peftkit.merge(model, [other.path])


def test_values_too_large_for_float16_are_an_error_that_names_the_weight() -> None:
    weight = torch.full((2, 2), 1e5)
    with pytest.raises(RunError, match="layer has values too large for float16: choose bfloat16 or float32"):
        merged_weight("layer", weight, None, torch.float16)
    assert torch.isfinite(merged_weight("layer", weight, None, torch.bfloat16)).all()


def test_nf4_weights_that_a_forward_pass_repacked_are_refused(base: Path, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(PLAIN, quant="nf4")
    model, _ = load_base(base, quant="nf4")
    model.get_submodule("model.layers.0.mlp.up_proj").weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(InputError, match="load the base afresh"):
        peftkit.merge(model, [adapter])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENDS)
def test_adapters_at_the_models_ends_are_merged_saved_and_read_back(
    name: str, tied: bool, base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    if not tied:
        config = LlamaConfig.from_pretrained(base, initializer_range=0.02, tie_word_embeddings=False)
        LlamaForCausalLM(config).save_pretrained(base)
    adapter = make_adapter(ENDS[name])
    model, _ = load_base(base)
    ids = some_ids()
    ids[0, :3] = torch.tensor([70, 9, 101])
    merged = peftkit.merge(model, [adapter])
    assert model.config.tie_word_embeddings is tied, "the base is as it was"
    merged.save_pretrained(tmp_path / "merged")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    still_tied = tied and name == "tokens"
    assert read.config.tie_word_embeddings is still_tied
    assert (read.lm_head.weight is read.get_input_embeddings().weight) is still_tied
    with torch.no_grad():
        bare, found, reread = model(ids).logits, merged(ids).logits, read(ids).logits
    assert torch.equal(found, reread)
    wanted = logits_with(adapter, model, ids)
    assert relative(bare, wanted) > 0.005, "an adapter that does something"
    assert relative(found, wanted) < 1e-5


def test_a_bias_is_merged_where_the_base_has_one_and_else_refused(
    seed: int, base: Path, make_adapter: MakeAdapter
) -> None:
    adapter = make_adapter(LoraConfig(r=4, alpha=8, targets=["q_proj", "v_proj"], lora_bias=True))
    model, _ = load_base(base)
    with pytest.raises(UnsupportedError, match=r"lora_bias: .* has no bias"):
        peftkit.merge(model, [adapter])
    config = LlamaConfig.from_pretrained(base, attention_bias=True)
    biased = LlamaForCausalLM(config).eval()
    for path, parameter in biased.named_parameters():
        if path.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ids = some_ids()
    merged = peftkit.merge(biased, [adapter])
    with torch.no_grad():
        found = merged(ids).logits
    assert relative(found, logits_with(adapter, biased, ids)) < 1e-5


def test_an_untied_model_stays_untied(seed: int, make_adapter: MakeAdapter) -> None:
    adapter = make_adapter(PLAIN)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    merged = peftkit.merge(model, [adapter])
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(merged.lm_head.weight, merged.get_input_embeddings().weight)
    ids = some_ids()
    with torch.no_grad():
        found = merged(ids).logits
    assert relative(found, logits_with(adapter, model, ids)) < 1e-5


def test_a_row_of_zeros_stays_one_under_dora(seed: int) -> None:
    weight, magnitude = torch.randn(6, 5), torch.rand(6) + 0.5
    weight[2], lora_B = 0.0, torch.randn(6, 3)
    lora_B[2] = 0.0  # a padding token's row, which nothing trains
    merged = Update(torch.randn(3, 5), lora_B, 2.0, magnitude).applied(weight)
    assert torch.equal(merged[2], torch.zeros(5)) and torch.isfinite(merged).all()
    torch.testing.assert_close(merged[3:].norm(dim=1), magnitude[3:])
