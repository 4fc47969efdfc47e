"""The adapter folder: what is written, what is refused on reading, and that writing never leaves half a folder."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.artifact import Artifact, load_adapter, read_adapter, save_adapter, write_adapter, write_parts
from peftkit.errors import AdapterError, InputError, RunError, UnsupportedError
from peftkit.methods import (
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    attach,
    attached,
    detach,
)

CONFIG = LoraConfig(r=2, alpha=4, targets=["q_proj", "v_proj"])


@pytest.fixture
def model(seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def saved(model: PreTrainedModel, tmp_path: Path) -> Artifact:
    attach(model, CONFIG)
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter)
    artifact = save_adapter(model, tmp_path / "a", step=7)
    detach(model)
    return artifact


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Sets or (None) drops tensors by the end of their key, and forgets the record that would tell."""
    path = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name, value in changes.items():
        key = next((key for key in tensors if key.endswith(name)), name)
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    (folder / "peftkit.json").unlink()


def test_what_is_written_is_read_back(model: PreTrainedModel, saved: Artifact) -> None:
    read = read_adapter(saved.path, config=model.config)
    assert (read.config, read.uid, read.record) == (saved.config, saved.uid, saved.record)
    assert read.record["step"] == 7
    assert all(torch.equal(read.tensors[key], value) for key, value in saved.tensors.items())


def test_the_files_are_pefts(saved: Artifact) -> None:
    fields = json.loads((saved.path / "adapter_config.json").read_text())
    assert (fields["peft_type"], fields["r"], fields["lora_alpha"], fields["task_type"]) == ("LORA", 2, 4, "CAUSAL_LM")
    assert fields["target_modules"] == ["q_proj", "v_proj"] and fields["inference_mode"] is True
    with safetensors.safe_open(saved.path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in file.keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ["q_proj", "v_proj"], "exclude": ["v_proj", "layers.0.self_attn.q_proj"]},
        {"targets": r".*\.(q|v)_proj", "exclude": r".*layers\.0\..*"},
        {"exclude": ["mlp.down_proj"], "layers_to_transform": [1]},
        {"targets": ["layers.0.self_attn.q_proj"], "layers_to_transform": [0, 1]},
        {"rank_pattern": {"q_proj": 2, ".*self_attn.*": 5, r".*\.1\..*": 3}, "alpha_pattern": {"v_proj": 3, ".*": 5}},
    ],
    ids=str,
)
def test_layers_left_out_and_the_order_of_patterns_are_read_back_without_the_base(
    model: PreTrainedModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = LoraConfig(**settings)
    attach(model, config)
    saved = save_adapter(model, tmp_path / "a")
    read = read_adapter(tmp_path / "a")
    assert read.uid == saved.uid == read_adapter(tmp_path / "a", config=model.config).uid
    assert isinstance(read.config, LoraConfig)
    assert list(read.config.rank_pattern.items()) == list(config.rank_pattern.items())


def test_a_tensor_of_an_excluded_layer_is_refused_without_the_base(saved: Artifact) -> None:
    edit_config(saved.path, exclude_modules=["v_proj"])
    with pytest.raises(AdapterError, match=r"match nothing in the model: .*v_proj"):
        read_adapter(saved.path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": "much"}, "json: lora_alpha: .* not 'much'"),
        ({"target_modules": {"q_proj": 1}}, "json: target_modules: "),
        ({"trainable_token_indices": {"embed_tokens": "x"}}, "json: trainable_token_indices: "),
        ({"use_dora": True, "lora_bias": True}, "json: lora_bias can't be combined"),
        ({"base_model_name_or_path": 5}, "json: base_model_name_or_path must be"),
    ],
)
def test_a_wrong_field_is_called_what_the_file_calls_it(saved: Artifact, fields: dict[str, Any], message: str) -> None:
    edit_config(saved.path, **fields)
    with pytest.raises(AdapterError, match=message):
        read_adapter(saved.path)


def test_json_of_endless_depth_is_refused(saved: Artifact) -> None:
    (saved.path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="can't be read as JSON"):
        read_adapter(saved.path)


def test_a_bottleneck_of_one_dimension_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    attach(model, BottleneckConfig(bottleneck_size=3))
    saved = save_adapter(model, tmp_path / "a")
    edit_tensors(saved.path, **{name: torch.zeros(3) for name in saved.tensors if name.endswith("down.weight")})
    with pytest.raises(AdapterError, match="has shape"):
        read_adapter(saved.path)


@pytest.mark.parametrize("layer", ["9" * 8, "9" * 5000, "\u0663"], ids=len)
def test_a_layer_out_of_all_proportion_is_refused(model: PreTrainedModel, tmp_path: Path, layer: str) -> None:
    attach(model, BottleneckConfig(bottleneck_size=3))
    saved = save_adapter(model, tmp_path / "a")
    edit_tensors(saved.path, **{f"base_model.model.model.layers.{layer}.mlp_adapter.up.bias": torch.zeros(32)})
    with pytest.raises(AdapterError, match="1 tensors match nothing in the model"):
        read_adapter(saved.path)


def test_uid_follows_content_and_not_names_order_or_dropout(saved: Artifact, tmp_path: Path) -> None:
    def uid(config: LoraConfig, tensors: dict[str, torch.Tensor]) -> str:
        return write_adapter(tmp_path / "b", config, tensors).uid

    assert uid(LoraConfig(r=2, alpha=4, targets=["v_proj", "q_proj"], dropout=0.3), saved.tensors) == saved.uid
    assert uid(LoraConfig(r=2, alpha=8, targets=["v_proj", "q_proj"]), saved.tensors) != saved.uid
    key = next(iter(saved.tensors))
    changed = saved.tensors[key].clone()
    changed.view(-1)[0] += 1e-6
    assert uid(CONFIG, {**saved.tensors, key: changed}) != saved.uid


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": None}, "peft_type is missing"),
        ({"peft_type": "LORAA"}, "LORAA isn't one of.*did you mean 'LORA'"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"r": 0}, "r: "),
        ({"target_modules": ["q_proj", "wq"]}, "'wq' matches no module"),
        ({"target_modules": ["q_proj"]}, "match nothing in the model.*v_proj"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "missing.*k_proj"),
        ({"rank_pattern": {"v_proj": 4}}, "v_proj.lora_A.weight has shape"),
        ({"rank_pattern": {"down_proj": 4}}, "rank_pattern: 'down_proj'"),
        ({"lora_alpha": 1e308}, "alpha: .*less than or equal to"),
        ({"target_modules": "(.*)*(.*)*(.*)*(.*)*(.*)*(.*)*x"}, "target_modules|targets: .*(takes too long|no module)"),
        ({"lora_bias": True}, "missing.*lora_B.bias"),
        ({"modules_to_save": ["lm_head"]}, "missing.*lm_head.weight"),
        ({"modules_to_save": ["head"]}, "missing.*lm_head.weight"),
        ({"modules_to_save": ["lm_head", ""]}, "modules_to_save: '' names no module"),
        ({"modules_to_save": ["heed"]}, "modules_to_save: 'heed' names no module"),
        ({"trainable_token_indices": [1]}, "missing.*embed_tokens.token_adapter"),
        ({"trainable_token_indices": [1000]}, "there is no token 1000"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    model: PreTrainedModel, saved: Artifact, fields: Any, message: str
) -> None:
    edit_config(saved.path, **fields)
    with pytest.raises(AdapterError, match=message):
        read_adapter(saved.path, config=model.config)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True, "use_rslora": True},
        {"bias": "lora_only"},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2]]},
        {"a_field_of_tomorrow": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_feature_that_cannot_be_honoured_is_refused_by_name(saved: Artifact, fields: dict[str, Any]) -> None:
    edit_config(saved.path, **fields)
    name = next(iter(fields))
    with pytest.raises(UnsupportedError, match=name) as caught:
        read_adapter(saved.path)
    assert caught.value.field == name


def test_fields_that_say_nothing_are_read_past(saved: Artifact) -> None:
    edit_config(saved.path, a_field_of_tomorrow=None, another=False, eva_config=None, peft_version="0.22.0")
    assert read_adapter(saved.path).uid == saved.uid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.self_attn.q_proj.lora_B.weight": None}, "missing.*lora_B|only lora_A"),
        ({"stray.weight": torch.zeros(2, 2)}, "stray"),
        ({"layers.1.self_attn.v_proj.lora_A.weight": torch.zeros(2, 31)}, "has shape"),
        ({"layers.1.self_attn.v_proj.lora_A.weight": torch.full((2, 32), float("nan"))}, "aren't finite"),
        ({"layers.1.self_attn.v_proj.lora_A.weight": torch.tensor([[math.inf, -math.inf] * 16] * 2)}, "aren't finite"),
        (
            {"layers.1.self_attn.v_proj.lora_A.weight": torch.full((2, 32), math.nan).to(torch.float8_e4m3fn)},
            "aren't finite|float8",
        ),
        ({"layers.1.self_attn.v_proj.lora_A.weight": torch.zeros(2, 32, dtype=torch.int8)}, "int8"),
    ],
    ids=["missing", "stray", "shape", "nan", "inf", "nan in 8 bits", "dtype"],
)
def test_tensors_that_do_not_fit_are_refused(
    model: PreTrainedModel, saved: Artifact, changes: Any, message: str
) -> None:
    edit_tensors(saved.path, **changes)
    with pytest.raises(AdapterError, match=message):
        load_adapter(model, saved.path)
    assert attached(model) == []
    if "shape" not in message:
        with pytest.raises(AdapterError, match=message):
            read_adapter(saved.path)


def test_missing_prefix_is_an_error_and_not_an_adapter_of_zeros(model: PreTrainedModel, saved: Artifact) -> None:
    path = saved.path / "adapter_model.safetensors"
    stripped = {key.removeprefix("base_model.model."): value for key, value in saved.tensors.items()}
    safetensors.torch.save_file(stripped, path)
    with pytest.raises(AdapterError, match="match nothing"):
        read_adapter(saved.path, config=model.config)


def test_frozen_copies_that_peft_stores_are_left_aside(saved: Artifact, model: PreTrainedModel) -> None:
    edit_tensors(saved.path, **{"base_model.model.lm_head.base_layer.weight": torch.zeros(97, 32)})
    assert read_adapter(saved.path, config=model.config).uid == saved.uid


def test_damaged_folders_are_refused_with_the_file_named(saved: Artifact, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(AdapterError, match=message):
            read_adapter(saved.path)

    with pytest.raises(AdapterError, match="no adapter folder"):
        read_adapter(tmp_path / "nowhere")
    weights, config = saved.path / "adapter_model.safetensors", saved.path / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused("adapter_model.safetensors is damaged")
    weights.unlink()
    refused("has no adapter_model.safetensors")
    (saved.path / "adapter_model.bin").write_bytes(b"x")
    refused("pickled.*weights_only=True")
    config.write_text("{")
    refused("adapter_config.json can't be read as JSON")
    config.write_text("[]")
    refused("one JSON object")
    config.unlink()
    refused("isn't an adapter folder")


def test_a_record_of_another_content_is_noticed(saved: Artifact) -> None:
    edit_config(saved.path, lora_alpha=5)
    with pytest.raises(AdapterError, match="uid differs"):
        read_adapter(saved.path)


def test_a_prompt_of_another_width_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    write_adapter(tmp_path / "p", PromptTuningConfig(num_virtual_tokens=3), {"prompt_embeddings": torch.randn(3, 16)})
    assert read_adapter(tmp_path / "p").config.kind == "prompt"
    with pytest.raises(AdapterError, match=r"has shape \[3, 16\].*\[3, 32\]"):
        read_adapter(tmp_path / "p", config=model.config)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_full_disk_leaves_what_was_there(
    saved: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, allowed: int
) -> None:
    target = saved.path if existing else tmp_path / "new"
    synced = 0

    def full(fd: int) -> None:
        nonlocal synced
        synced += 1
        if synced > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="no room"):
        write_adapter(target, CONFIG, {key: value + 1 for key, value in saved.tensors.items()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert read_adapter(saved.path).uid == saved.uid


def test_writing_over_an_adapter_keeps_the_folders_other_files(saved: Artifact) -> None:
    (saved.path / "metrics.jsonl").write_text("{}")
    write_adapter(saved.path, CONFIG, {key: value + 1 for key, value in saved.tensors.items()})
    assert read_adapter(saved.path).uid != saved.uid
    assert (saved.path / "metrics.jsonl").read_text() == "{}"


def test_saving_needs_an_adapter(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no adapter attached"):
        save_adapter(model, tmp_path / "a")


PAIRS = [
    (CONFIG, PromptTuningConfig(num_virtual_tokens=3)),
    (PTuningV2Config(num_virtual_tokens=4), CONFIG),
    (BottleneckConfig(bottleneck_size=3), PrefixTuningConfig(num_virtual_tokens=2)),
    (CONFIG, BottleneckConfig(bottleneck_size=3, variant="parallel")),
    (LoraConfig(r=2, targets=["embed_tokens", "lm_head"]), PTuningConfig(num_virtual_tokens=2)),
    (LoraConfig(r=2, modules_to_save=["embed_tokens"]), PromptTuningConfig(num_virtual_tokens=2)),
]


def save_pair(model: PreTrainedModel, pair: tuple[AnyConfig, AnyConfig], path: Path) -> Artifact:
    for config in pair:
        attach(model, config)
    for method in attached(model):
        for parameter in method.parameters().values():
            torch.nn.init.normal_(parameter, std=0.3)
    return save_adapter(model, path)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "+".join(config.kind for config in pair))
def test_two_methods_are_saved_together_and_come_back(
    model: PreTrainedModel, tmp_path: Path, pair: tuple[AnyConfig, AnyConfig]
) -> None:
    saved = save_pair(model, pair, tmp_path / "a")
    ids = torch.randint(1, 97, (2, 9))
    wanted = model(input_ids=ids).logits
    detach(model)
    again = read_adapter(tmp_path / "a", config=model.config)
    assert again.uid == saved.uid and again.kind == saved.kind == "+".join(config.kind for config in pair)
    assert [part.config for part in again.parts] == [part.config for part in saved.parts]
    load_adapter(model, tmp_path / "a")
    assert torch.equal(model(input_ids=ids).logits, wanted)
    assert not any(method.trainable for method in attached(model))


def test_each_of_two_methods_is_an_adapter_of_its_own(model: PreTrainedModel, tmp_path: Path) -> None:
    saved = save_pair(model, PAIRS[0], tmp_path / "a")
    for part in saved.parts:
        alone = read_adapter(tmp_path / "a" / part.config.kind, config=model.config)
        assert alone.config == part.config and alone.uid != saved.uid
    with pytest.raises(UnsupportedError, match=r"two methods together.*a/lora"):
        saved.tensors  # noqa: B018 - a property


def test_the_identity_of_two_methods_is_over_both_and_not_over_their_order(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    saved = save_pair(model, PAIRS[0], tmp_path / "a")
    parts = [(part.config, part.tensors) for part in saved.parts]
    assert write_parts(tmp_path / "b", parts[::-1]).uid == saved.uid
    config, tensors = parts[1]
    changed = write_parts(tmp_path / "c", [parts[0], (config, {name: one + 1 for name, one in tensors.items()})])
    assert changed.uid != saved.uid


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["lora", "lorra"], "parts must be a list of methods"),
        (["lora", "../lora"], "parts must be a list of methods"),
        ("lora", "parts must be a list of methods"),
        ([], "parts must be a list of methods"),
        (["prompt", "ptuning"], "can't stand beside"),
        (["lora", "bottleneck"], "no adapter folder .*bottleneck"),
        (["prompt", "lora"], "uid differs|$"),
    ],
)
def test_a_record_with_other_parts_than_the_folders_is_refused(
    model: PreTrainedModel, tmp_path: Path, parts: Any, message: str
) -> None:
    saved = save_pair(model, PAIRS[0], tmp_path / "a")
    record = json.loads((saved.path / "peftkit.json").read_text())
    (saved.path / "peftkit.json").write_text(json.dumps({**record, "parts": parts}))
    if parts == ["prompt", "lora"]:
        assert read_adapter(saved.path).uid == saved.uid
        return
    with pytest.raises(AdapterError, match=message):
        read_adapter(saved.path)


@pytest.mark.parametrize("base", ["a name", ["x"], {"fingerprint": "f00"}, {"fingerprint": [1]}])
def test_a_record_whose_base_is_no_object_is_refused(saved: Artifact, base: Any) -> None:
    record = json.loads((saved.path / "peftkit.json").read_text())
    (saved.path / "peftkit.json").write_text(json.dumps({**record, "base": base}))
    with pytest.raises(AdapterError, match=r"peftkit\.json: base(\.fingerprint)? must be an object"):
        read_adapter(saved.path)


@pytest.mark.parametrize(
    "fields",
    [
        {"base": {"id": 5}},
        {"recipe": "a.yaml"},
        {"recipe": {"quant": "nf4"}},
        {"chat_template": "{{ x }}"},
        {"chat_template": {"sha256": "x"}},
        {"quant": 5},
    ],
)
def test_a_record_whose_fields_have_other_shapes_is_refused(saved: Artifact, fields: dict[str, Any]) -> None:
    path = saved.path / "peftkit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(AdapterError, match=f"peftkit.json: {next(iter(fields))}[.a-z]* must be"):
        read_adapter(saved.path)


@pytest.mark.parametrize(
    "config",
    [PrefixTuningConfig(num_virtual_tokens=3), PTuningV2Config(num_virtual_tokens=3), PTuningConfig(encoder="lstm")],
    ids=lambda config: config.kind,
)
def test_loading_virtual_tokens_computes_no_start(
    model: PreTrainedModel, tmp_path: Path, config: AnyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(model, config)
    saved = save_adapter(model, tmp_path / "a")
    detach(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", None)
        patch.setattr(torch.nn, "LSTM", None)
        load_adapter(model, tmp_path / "a")
    assert save_adapter(model, tmp_path / "b").uid == saved.uid
    assert read_adapter(tmp_path / "b").config == saved.config


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_tensors_of_types_that_no_adapter_has_are_refused(saved: Artifact, dtype: torch.dtype) -> None:
    tensors = {key: value.to(dtype) for key, value in saved.tensors.items()}
    safetensors.torch.save_file(tensors, saved.path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"where one of float32, .* is wanted"):
        read_adapter(saved.path)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2, 2), (0, 4)])
def test_virtual_tokens_of_another_shape_are_refused(
    model: PreTrainedModel, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    path = save_adapter(attach(model, PromptTuningConfig(num_virtual_tokens=3)), tmp_path / "a").path
    (path / "peftkit.json").unlink()
    safetensors.torch.save_file({"prompt_embeddings": torch.zeros(shape)}, path / "adapter_model.safetensors")
    for config in (None, model.config):
        with pytest.raises(AdapterError, match="prompt_embeddings has shape"):
            read_adapter(path, config=config)


@pytest.mark.parametrize("fields", [{"alpha_pattern": {"q_proj": float("nan")}}, {"lora_alpha": float("inf")}])
def test_a_strength_that_is_no_finite_number_is_refused(saved: Artifact, fields: dict[str, Any]) -> None:
    edit_config(saved.path, **fields)
    with pytest.raises(AdapterError, match="finite"):
        read_adapter(saved.path)
