"""The adapter folder: what is written, what is refused on reading, and that writing never leaves half a folder."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.artifact import Artifact, load_adapter, read_adapter, save_adapter, write_adapter
from peftkit.errors import AdapterError, InputError, RunError, UnsupportedError
from peftkit.methods import LoraConfig, PromptTuningConfig, attach, attached, detach

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
        ({"r": 0}, "r: "),
        ({"target_modules": ["q_proj", "wq"]}, "'wq' matches no module"),
        ({"target_modules": ["q_proj"]}, "match nothing in the model.*v_proj"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "missing.*k_proj"),
        ({"rank_pattern": {"v_proj": 4}}, "v_proj.lora_A.weight has shape"),
        ({"rank_pattern": {"down_proj": 4}}, "rank_pattern: 'down_proj'"),
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
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1]},
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
        ({"layers.1.self_attn.v_proj.lora_A.weight": torch.zeros(2, 32, dtype=torch.int8)}, "int8"),
    ],
    ids=["missing", "stray", "shape", "nan", "dtype"],
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


def test_saving_needs_exactly_one_adapter(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="0 adapters"):
        save_adapter(model, tmp_path / "a")
    attach(attach(model, CONFIG), PromptTuningConfig())
    with pytest.raises(InputError, match="2 adapters"):
        save_adapter(model, tmp_path / "a")


@pytest.mark.parametrize("fields", [{"alpha_pattern": {"q_proj": float("nan")}}, {"lora_alpha": float("inf")}])
def test_a_strength_that_is_no_finite_number_is_refused(saved: Artifact, fields: dict[str, Any]) -> None:
    edit_config(saved.path, **fields)
    with pytest.raises(AdapterError, match="finite"):
        read_adapter(saved.path)
