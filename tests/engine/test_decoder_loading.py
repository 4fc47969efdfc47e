"""Specs and weights read from folders: what they hold, what is refused, and NF4 as training sees it."""

import dataclasses
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen2Config, Qwen3Config

from peftkit.errors import BaseModelError
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec, read_spec
from peftkit_serve.models.weights import (
    Matrix,
    ModelWeights,
    Nf4Matrix,
    Nf4Weight,
    base_linear,
    join_nf4,
    load_weights,
    product,
)

CPU = torch.device("cpu")
NF4: dict[str, Any] = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 99,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(**changed: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changed), encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def base(tmp_path: Path, seed: int) -> Path:
    """A random Llama with weights of its own in each matrix."""
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, **settings: Any) -> tuple[ModelSpec, ModelWeights]:
    spec = read_spec(folder)
    return spec, load_weights(folder, spec, **({"dtype": torch.float32, "device": CPU} | settings))


def dense(weight: Matrix) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight.to_dense() if weight.is_mkldnn else weight


def test_sizes_are_read_and_heads_share_the_hidden_size(
    write_config: Callable[..., Path],
) -> None:
    spec = read_spec(write_config())
    assert (spec.architecture, spec.num_layers, spec.head_dim, spec.max_position) == ("LlamaForCausalLM", 2, 16, 99)
    assert spec.projection_shapes == ((64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128))
    assert spec.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2
    assert spec.windows == (None, None) and not spec.tied_embeddings and spec.eos_token_ids == (2,)


def test_old_names_of_rope_settings_are_understood(write_config: Callable[..., Path]) -> None:
    spec = read_spec(write_config(rope_theta=500.0))
    assert spec.inv_freq == pytest.approx([500.0 ** -(i / 8) for i in range(8)])
    scaled = read_spec(write_config(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0}))
    assert scaled.inv_freq == pytest.approx([f / 4 for f in spec.inv_freq])


def test_ends_of_sequence_come_from_the_generation_config_first(write_config: Callable[..., Path]) -> None:
    folder = write_config()
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    assert read_spec(folder).eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}', encoding="utf-8")
    assert read_spec(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").unlink()
    assert read_spec(write_config(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gemma"}, "model_type gemma can't be served; llama, mistral, qwen2, qwen3 can"),
        ({"hidden_act": "relu"}, "hidden_act relu can't be served; silu, swish, gelu_pytorch_tanh can"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type dynamic can't be served; default, linear, llama3, yarn can",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "the base is quantised already"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor can't be served"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types has chunked_attention, which can't be served; full_attention, sliding_attention can",
        ),
        ({"hidden_size": "wide"}, "hidden_size"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads is 4: a multiple of num_key_value_heads, 3, is wanted",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0: at least 1, or null, is wanted"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    write_config: Callable[..., Path], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(BaseModelError, match=message) as error:
        read_spec(write_config(**changed))
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (Qwen2Config(num_hidden_layers=3, use_sliding_window=False, sliding_window=5), (None, None, None)),
        (
            Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=2),
            (None, None, 5),
        ),
        (Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "full_attention"]), (None, None)),
    ],
)
def test_windows_follow_the_layer_types(tmp_path: Path, config: Any, windows: tuple[int | None, ...]) -> None:
    config.save_pretrained(tmp_path)
    assert read_spec(tmp_path).windows == windows


def test_shards_hold_the_same_weights_as_one_file(base: Path, tmp_path: Path) -> None:
    _, whole = load(base)
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    (base / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(2):
        part = {name: tensors[name] for name in names[shard::2]}
        save_file(part, base / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{shard}.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    _, sharded = load(base)
    assert torch.equal(dense(whole.layers[1].qkv_OI), dense(sharded.layers[1].qkv_OI))
    assert torch.equal(dense(whole.head_VH), dense(sharded.head_VH)) and whole.nbytes == sharded.nbytes


def test_projections_are_fused_in_order(base: Path) -> None:
    _, weights = load(base)
    tensors = load_file(base / "model.safetensors")
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    qkv = torch.cat([tensors[f"{attention}.{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([tensors[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(dense(weights.layers[1].qkv_OI), qkv)
    assert torch.equal(dense(weights.layers[1].gate_up_OI), gate_up)
    assert weights.nf4_bytes == weights.cached_bytes == 0
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_tied_head_is_the_embedding_unless_the_file_has_its_own(tmp_path: Path, seed: int) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG | {"tie_word_embeddings": True})).save_pretrained(tmp_path)
    _, tied = load(tmp_path, dtype=torch.bfloat16)
    assert tied.head_VH is tied.embedding_VH
    own = torch.randn(40, 64)
    change_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": own}))
    assert torch.equal(dense(load(tmp_path)[1].head_VH), own)


def test_weights_of_a_lower_precision_are_cast_once(base: Path) -> None:
    change_weights(base, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    _, weights = load(base)
    stored = load_file(base / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(dense(weights.layers[0].down_OI), stored.float())


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), f"tensor {DOWN} is missing; did you mean"),
        (
            lambda t: t.update({DOWN: torch.zeros(64, 127)}),
            rf"tensor {DOWN} has shape \[64, 127\], config.json makes it",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.down_proj.weight": torch.zeros(1), "z": torch.zeros(1)}),
            "2 tensors belong to no layer, the first is model.layers.2.mlp.down_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            "1 tensors belong to no layer, the first is model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(
    base: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    change_weights(base, change)
    with pytest.raises(BaseModelError, match=message):
        load(base)


def test_rope_frequencies_in_old_checkpoints_are_passed_over(base: Path) -> None:
    change_weights(base, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(base)


def test_nf4_weights_are_those_of_training_bit_for_bit(base: Path) -> None:
    _, weights = load(base, quant="nf4")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    trained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=settings)

    def dequantised(*paths: str) -> Tensor:
        modules = [trained.get_submodule(path) for path in paths]
        return torch.cat([dequantize_4bit(m.weight.data, m.weight.quant_state) for m in modules])

    for index, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        assert torch.equal(dense(layer.qkv_OI), dequantised(*(f"{attention}.{name}_proj" for name in "qkv")))
        assert torch.equal(dense(layer.o_OI), dequantised(f"{attention}.o_proj"))
        assert torch.equal(dense(layer.gate_up_OI), dequantised(f"{mlp}.gate_proj", f"{mlp}.up_proj"))
        assert torch.equal(dense(layer.down_OI), dequantised(f"{mlp}.down_proj"))
    assert torch.equal(dense(weights.head_VH), trained.lm_head.weight), "the output embedding isn't quantised"
    assert len(weights.nf4) == 14
    num_elements = sum(dense(w).numel() for y in weights.layers for w in (y.qkv_OI, y.o_OI, y.gate_up_OI, y.down_OI))
    assert weights.cached_bytes == 4 * num_elements
    scales = num_elements // 64 + 14 * (256 + 1 + 1) * 4  # a byte a block; a codebook, a scale and an offset a layer
    assert weights.nf4_bytes == num_elements // 2 + scales
    assert weights.nbytes == load(base)[1].nbytes + weights.nf4_bytes


@pytest.fixture
def stored(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base as bitsandbytes saves it in NF4."""
    folder = tmp_path_factory.mktemp("nf4")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=settings)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("cached", [False, True])
def test_an_nf4_checkpoint_is_read_as_it_is(base: Path, stored: Path, cached: bool) -> None:
    spec, weights = load(stored, cached=cached)
    _, quantised = load(base, quant="nf4", cached=cached)
    assert spec.holds_nf4 and weights.nf4.keys() == quantised.nf4.keys() and weights.nbytes == quantised.nbytes
    for path, weight in weights.nf4.items():
        assert all(map(torch.equal, weight.tensors, quantised.nf4[path].tensors)), path
        assert torch.equal(base_linear(weights, spec, path)[0], base_linear(quantised, spec, path)[0])
    assert torch.equal(dense(weights.head_VH), dense(quantised.head_VH))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}.absmax"), f"the scales of tensor {DOWN} can't be read"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{DOWN}.")], f"tensor {DOWN} is not in NF4"),
        (lambda t: t.update({DOWN: t[DOWN][:-1]}), rf"tensor {DOWN} has shape \[4095, 1\]"),
        (lambda t: t.update({"z.weight.absmax": torch.zeros(1)}), "1 tensors belong to no layer"),
    ],
)
def test_an_nf4_checkpoint_that_is_damaged_is_refused_by_tensor(
    stored: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    change_weights(stored, change)
    with pytest.raises(BaseModelError, match=message):
        load(stored)


def test_nf4_without_double_quantisation_is_refused(stored: Path) -> None:
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_use_double_quant"] = False
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelError, match="not by bitsandbytes to NF4 with double quantisation"):
        read_spec(stored)


@pytest.mark.parametrize("deterministic", [False, True])
def test_codes_alone_compute_what_their_dequantised_copies_do(base: Path, deterministic: bool) -> None:
    _, cached = load(base, quant="nf4")
    spec, weights = load(base, quant="nf4", cached=False)
    assert weights.cached_bytes == 0 and weights.nf4_bytes == cached.nf4_bytes
    assert weights.nbytes == cached.nbytes - cached.cached_bytes
    for layer, wanted in zip(weights.layers, cached.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            matrix, copy = getattr(layer, f"{name}_OI"), getattr(wanted, f"{name}_OI")
            assert isinstance(matrix, Nf4Matrix)
            x, bias = torch.randn(7, matrix.in_features), torch.randn(sum(matrix.out_features))
            y = product(x, matrix, bias, deterministic=deterministic)
            torch.testing.assert_close(y, x @ dense(copy).T + bias, rtol=1e-5, atol=1e-5)
    for path in ("model.layers.1.self_attn.v_proj", "model.layers.0.mlp.down_proj"):
        assert torch.equal(base_linear(weights, spec, path)[0], base_linear(cached, spec, path)[0])


def in_nf4(out_features: int, scale: float) -> Nf4Weight:
    codes, state = quantize_4bit(torch.randn(out_features, 256) * scale, **NF4)
    assert state.state2 is not None and state.offset is not None
    return Nf4Weight(codes.flatten(), state.absmax, state.state2.code, state.state2.absmax, state.offset)


@pytest.mark.parametrize("rows", [3, 70])
def test_one_product_takes_matrices_in_nf4_as_parts_of_one(seed: int, rows: int) -> None:
    parts, outs = (in_nf4(64, 0.1), in_nf4(128, 3.0), in_nf4(64, 1.0)), (64, 128, 64)
    views, joined = join_nf4(parts)
    assert joined is not None
    for view, part in zip(views, parts, strict=True):
        assert all(map(torch.equal, view.tensors, part.tensors))
        assert view.code_X.untyped_storage().data_ptr() == joined.code_X.untyped_storage().data_ptr()
    x, bias = torch.randn(rows, 256), torch.randn(256)
    together = product(x, Nf4Matrix(views, outs, 256, joined), bias, deterministic=False)
    apart = product(x, Nf4Matrix(parts, outs, 256), bias, deterministic=False)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_matrices_in_nf4_stay_apart_where_one_ends_within_a_nested_scale_or_has_other_steps(seed: int) -> None:
    whole, ragged = in_nf4(64, 1.0), in_nf4(33, 1.0)
    assert join_nf4((whole, ragged)) == ((whole, ragged), None)
    within_a_block = dataclasses.replace(
        whole, code_X=whole.code_X[:-16]
    )  # as many scales, but a last one of half a block
    assert join_nf4((whole, within_a_block)) == ((whole, within_a_block), None)
    other = dataclasses.replace(whole, absmax_code=whole.absmax_code + 1)
    assert join_nf4((whole, other)) == ((whole, other), None)
    assert join_nf4((ragged,)) == ((ragged,), ragged)


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_each_projections_own_weight_and_bias_are_found_in_the_fused_ones(
    tmp_path: Path, seed: int, quant: str
) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    spec, weights = load(tmp_path, quant=quant)
    for layer in range(2):
        for name in PROJECTIONS:
            path = f"model.layers.{layer}.{name}"
            module = model.get_submodule(path)
            wanted = module.weight if quant == "none" else dequantize_4bit(*quantize_4bit(module.weight, **NF4))
            weight, bias = base_linear(weights, spec, path)
            assert torch.equal(weight, wanted) and bias is not None and torch.equal(bias, module.bias)
    assert torch.equal(base_linear(weights, spec, "lm_head")[0], model.lm_head.weight)


class Counted:
    """A source of random tensors that are counted while anybody holds them."""

    def __init__(self) -> None:
        self.held: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = torch.randn(shape)
        if ".layers." in name and len(shape) == 2:
            self.held.add(tensor)
            self.most = max(self.most, len(self.held))
        return tensor

    def check_all_taken(self) -> None: ...


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_no_more_than_one_fused_matrix_is_held_twice_while_a_base_is_loaded(
    write_config: Callable[..., Path], quant: str, seed: int
) -> None:
    spec, source = read_spec(write_config(num_hidden_layers=6, tie_word_embeddings=True)), Counted()
    load_weights(Path(), spec, quant=quant, dtype=torch.float32, device=CPU, cached=False, source=lambda *_: source)
    assert source.most <= 3, "query, key and value are the most that are fused"


def test_packed_weights_compute_what_the_plain_ones_do(base: Path) -> None:
    _, weights = load(base)
    x, layer = torch.randn(5, 64), weights.layers[0]
    torch.testing.assert_close(product(x, layer.qkv_OI, None, deterministic=False), x @ dense(layer.qkv_OI).T)
