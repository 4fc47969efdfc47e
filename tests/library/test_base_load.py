"""Bases in memory: frozen, in the dtype asked for, 4-bit where asked; shapes without weights."""

import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from peftkit.base import auto_device, auto_dtype, load_base, load_tokenizer, module_shapes, resolve_base
from peftkit.errors import BaseModelError, InputError
from peftkit_serve import Engine

SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def wide_base(request, tiny_base: Path, tmp_path: Path, seed: int) -> Path:
    """A base whose linear layers hold whole NF4 blocks."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


def logits(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 200, (2, 9), generator=generator)
    with torch.no_grad():
        return model(input_ids=ids).logits


class TestLoading:
    def test_logits_equal_those_of_transformers(self, wide_base, seed):
        model, _ = load_base(wide_base, device="cpu")
        expected = logits(AutoModelForCausalLM.from_pretrained(wide_base, dtype=torch.float32).eval(), seed)
        assert torch.equal(logits(model, seed), expected)

    def test_the_base_is_frozen_in_eval_mode_and_knows_its_name(self, wide_base):
        model, tokenizer = load_base(wide_base)
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert model.peftkit_base == resolve_base(wide_base)
        assert model.peftkit_quant == "none"
        assert tokenizer.is_fast

    def test_a_base_that_was_found_can_be_loaded(self, wide_base):
        info = resolve_base(wide_base)
        assert load_base(info)[0].peftkit_base is info

    def test_bf16_keeps_rotary_frequencies_in_fp32_and_the_head_tied(self, wide_base):
        model, _ = load_base(wide_base, dtype="bf16")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings

    def test_the_context_is_the_tokenizers_length_where_its_files_leave_it_open(self, wide_base):
        tokenizer = AutoTokenizer.from_pretrained(wide_base)
        assert tokenizer.model_max_length > 1e9
        assert load_tokenizer(resolve_base(wide_base)).model_max_length == SIZES["max_position_embeddings"]

    def test_a_tensor_that_is_missing_is_named(self, wide_base):
        tensors = load_file(wide_base / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, wide_base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BaseModelError, match=r"1 tensors are missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
            load_base(wide_base)

    def test_a_tensor_of_another_shape_is_named(self, wide_base):
        tensors = load_file(wide_base / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(63)
        save_file(tensors, wide_base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BaseModelError, match=r"model\.norm\.weight"):
            load_base(wide_base)


class TestNf4:
    def test_rows_that_are_no_whole_blocks_are_refused_on_a_cpu(self, tiny_base: Path, tmp_path: Path) -> None:
        # bitsandbytes 0.50 dequantises them wrongly there, without an error
        config = LlamaConfig(**{**SIZES, "intermediate_size": 96})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "narrow")
        AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path / "narrow")
        with pytest.raises(BaseModelError, match=r"down_proj has 96 inputs.*multiple of 64.*quant none"):
            load_base(tmp_path / "narrow", quant="nf4", device="cpu")
        with pytest.raises(BaseModelError, match="down_proj has 96 inputs"):
            Engine(tmp_path / "narrow", quant="nf4", device="cpu")

    @pytest.mark.parametrize("double_quant", [True, False])
    def test_every_linear_layer_but_the_head_is_4_bit(self, wide_base, double_quant):
        model, _ = load_base(wide_base, quant="nf4", double_quant=double_quant, device="cpu")
        linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        quantised = {path for path, module in linears.items() if isinstance(module, Linear4bit)}
        assert quantised == set(linears) - {"lm_head"} and len(quantised) == 14
        state = linears["model.layers.0.mlp.up_proj"].weight.quant_state
        assert (state.quant_type, state.blocksize, state.nested) == ("nf4", 64, double_quant)
        assert linears["model.layers.0.mlp.up_proj"].compute_dtype == torch.float32
        assert model.peftkit_quant == "nf4"

    def test_what_is_not_4_bit_stays_as_it_was(self, wide_base):
        model, _ = load_base(wide_base, quant="nf4", device="cpu")
        plain = load_file(wide_base / "model.safetensors")
        assert torch.equal(model.model.embed_tokens.weight, plain["model.embed_tokens.weight"])
        assert torch.equal(model.model.norm.weight, plain["model.norm.weight"])
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_logits_are_those_of_the_dequantised_weights(self, wide_base, seed):
        model, _ = load_base(wide_base, quant="nf4", device="cpu")
        reference = AutoModelForCausalLM.from_pretrained(wide_base, dtype=torch.float64).eval()
        for path, module in model.named_modules():
            if isinstance(module, Linear4bit):
                weight = dequantize_4bit(module.weight.data, module.weight.quant_state).double()
                reference.get_submodule(path).weight.data = weight
        # fp32 against fp64 over sums of at most 96 terms
        torch.testing.assert_close(logits(model, seed).double(), logits(reference, seed), atol=2e-5, rtol=1e-4)

    def test_without_bitsandbytes_one_line_says_how_to_get_it(self, wide_base, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InputError, match=r"pip install bitsandbytes$"):
            load_base(wide_base, quant="nf4")


class TestArguments:
    def test_auto_is_fp32_on_a_cpu(self):
        assert auto_dtype("auto", torch.device("cpu")) == torch.float32

    @pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((9, 0), torch.bfloat16)])
    def test_auto_is_bf16_on_a_gpu_that_has_it(self, monkeypatch, capability, dtype):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert auto_dtype("auto", torch.device("cuda:0")) == dtype

    def test_a_misspelt_dtype_gets_the_nearest_one(self):
        with pytest.raises(InputError, match="did you mean 'bfloat16'") as refused:
            auto_dtype("bflot16", torch.device("cpu"))
        assert refused.value.field == "dtype"

    def test_an_unknown_device_is_refused(self):
        with pytest.raises(InputError, match="auto, cpu, cuda"):
            auto_device("gpu0")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_a_gpu_that_is_not_there_is_refused(self):
        with pytest.raises(InputError, match="no GPU"):
            auto_device("cuda")

    def test_an_unknown_quantisation_is_refused(self, tiny_base):
        with pytest.raises(InputError, match="did you mean 'nf4'"):
            load_base(tiny_base, quant="fp4")  # type: ignore[arg-type]


class TestModuleShapes:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_shapes_are_those_of_the_real_weights(self, family):
        config = FAMILIES[family](**SIZES)
        state = AutoModelForCausalLM.from_config(config).state_dict()
        shapes = module_shapes(config)
        assert shapes["model.embed_tokens"] == (264, 64) and shapes["lm_head"] == (264, 64)
        assert shapes["model.layers.1.self_attn.k_proj"][1] == 64
        assert {path: tuple(state[f"{path}.weight"].shape) for path in shapes} == shapes
        assert len(shapes) == 2 * 7 + 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_loads(family, tiny_base, tmp_path, seed):
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES)).eval()
    model.save_pretrained(tmp_path / family)
    for file in tiny_base.glob("tokenizer*"):
        shutil.copy(file, tmp_path / family)
    loaded, _ = load_base(tmp_path / family, device="cpu")
    assert torch.equal(logits(loaded, seed), logits(model, seed))
    assert resolve_base(tmp_path / family).fingerprint.architecture == type(model).__name__
