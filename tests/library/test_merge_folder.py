"""Merged models and exported adapters on disk: what is in the folder, the proof, and that no half of it is left."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import peftkit
from peftkit.base import Quant, load_base, resolve_base
from peftkit.errors import BaseModelError, InputError, RunError, UnsupportedError
from peftkit.merge import adapter as adapter_export
from peftkit.merge import export_peft, merge_to_folder, named_base, transformers_name
from peftkit.merge.delta import Update
from peftkit.merge.equivalence import compare, logits_of, probe_texts, relative_limit
from peftkit.merge.shards import ShardWriter
from peftkit.merge.weights import BaseWeights
from peftkit.methods import (
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PromptTuningConfig,
    PTuningV2Config,
    attach,
    attached,
)

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
MakeAdapter = Callable[..., Path]


@pytest.fixture
def make_adapter(seed: int, tiny_base: Path, tmp_path: Path) -> MakeAdapter:
    """Saves a random adapter over the tiny base."""

    def make(config: AnyConfig, *, quant: Quant = "none", **record: Any) -> Path:
        model, _ = load_base(tiny_base, quant=quant)
        attach(model, config, seed=seed)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.05)
        peftkit.save_adapter(model, tmp_path / "adapter", **record)
        return tmp_path / "adapter"

    return make


@pytest.fixture
def adapter(make_adapter: MakeAdapter) -> Path:
    return make_adapter(LoraConfig(r=4, alpha=8))


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_the_reloaded_folder_gives_the_logits_of_base_and_adapter(
    quant: Quant, tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    adapter = make_adapter(LoraConfig(r=4, alpha=8), quant=quant)
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base)
    model, tokenizer = load_base(tiny_base, quant=quant)
    texts = ["an address: 1 Main St", "another text"]
    wanted = logits_of(peftkit.load_adapter(model, adapter), tokenizer, texts)
    found = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tokenizer, texts)
    assert compare(wanted, found, limit=1e-5).holds
    assert report.mode == {"none": "original", "nf4": "dequantized"}[quant]
    assert report.equivalence is not None and report.equivalence.relative < 1e-5
    assert report.equivalence.greedy_agreement == 1.0
    assert (report.num_merged, report.dtype) == (14, "float32")


def test_the_folder_is_a_whole_base_that_stays_tied(adapter: Path, tiny_base: Path, tmp_path: Path) -> None:
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and "quantization_config" not in config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == 2
    assert resolve_base(tmp_path / "out").fingerprint.tokenizer == resolve_base(tiny_base).fingerprint.tokenizer
    assert report.num_bytes >= (tmp_path / "out" / "model.safetensors").stat().st_size > 0


def test_the_report_beside_the_model_names_mode_adapter_base_and_figures(
    adapter: Path, tiny_base: Path, tmp_path: Path
) -> None:
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base)
    content = json.loads((tmp_path / "out" / "peftkit_merge.json").read_text())
    assert report.equivalence is not None
    assert content["equivalence"] == asdict(report.equivalence)
    assert content["adapter_uid"] == json.loads((adapter / "peftkit.json").read_text())["uid"]
    assert (content["mode"], content["dtype"], content["num_merged"]) == ("original", "float32", 14)
    assert content["base_fingerprint"] == asdict(resolve_base(tiny_base).fingerprint)


def test_the_adapters_chat_template_travels(tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    adapter = make_adapter(LoraConfig(r=2), chat_template={"text": TEMPLATE, "sha256": ""})
    merge_to_folder(adapter, tmp_path / "out", tiny_base, verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 256


def test_double_quantisation_is_the_one_of_training(tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path) -> None:
    recipe = {"quant": {"kind": "nf4", "double_quant": False, "compute_dtype": "auto"}}
    adapter = make_adapter(LoraConfig(r=2), quant="nf4", recipe=recipe)
    merge_to_folder(adapter, tmp_path / "out", tiny_base)
    model, _ = load_base(tiny_base, quant="nf4", double_quant=False)
    wanted = peftkit.merge(model, [adapter]).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_original_is_merged_into_the_weights_as_stored(
    tiny_base: Path, make_adapter: MakeAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = make_adapter(LoraConfig(r=2, targets=["q_proj"]), quant="nf4")
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base, into="original")
    stored, merged = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tiny_base, tmp_path / "out"))
    changed = {name for name in stored if not torch.equal(stored[name], merged[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}
    assert report.mode == "original" and "it is another model" in caplog.text


def test_weights_of_nf4_are_another_model_for_an_adapter_trained_without(
    tiny_base: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merge_to_folder(adapter, tmp_path / "original", tiny_base, verify=False)
    assert "another model" not in caplog.text
    merge_to_folder(adapter, tmp_path / "out", tiny_base, into="dequantized", verify=False)
    assert "wasn't trained on NF4: merged into NF4 weights it is another model" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_are_written_and_stay_within_their_limit(
    dtype: str, adapter: Path, tiny_base: Path, tmp_path: Path
) -> None:
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base, dtype=dtype)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)
    assert report.equivalence is not None
    assert 1e-5 < report.equivalence.relative < report.equivalence.limit < 0.03


def test_auto_is_the_type_the_base_is_stored_in(make_adapter: MakeAdapter, tiny_base: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "bf16")
    LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    report = merge_to_folder(make_adapter(LoraConfig(r=2)), tmp_path / "out", base)
    assert report.dtype == "bfloat16"


def test_a_merge_that_computes_something_else_is_an_error_and_leaves_nothing(
    adapter: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Update, "applied", lambda self, weight: weight)
    with pytest.raises(RunError, match="of their size away from those of base and adapter"):
        merge_to_folder(adapter, tmp_path / "out", tiny_base)
    assert left_in(tmp_path) == {"adapter"}


def test_a_target_that_is_taken_is_refused_and_untouched(adapter: Path, tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for write in (lambda out: merge_to_folder(adapter, out, tiny_base), lambda out: export_peft(adapter, out)):
        with pytest.raises(InputError, match="exists and isn't empty") as caught:
            write(tmp_path / "out")
        assert caught.value.field == "out"
        with pytest.raises(InputError, match="is a file"):
            write(tmp_path / "out" / "mine")
        with pytest.raises(InputError, match="is a symbolic link"):
            write(tmp_path / "link")
    assert left_in(tmp_path / "out") == {"mine"} and left_in(tmp_path) == {"adapter", "out", "link"}


def test_an_empty_target_folder_is_filled(adapter: Path, tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    merge_to_folder(adapter, tmp_path / "out", tiny_base, verify=False)
    assert "model.safetensors" in left_in(tmp_path / "out")


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_leaves_nothing(
    fault: Exception, adapter: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(self: Any, name: str, tensor: Any) -> None:
        raise fault

    monkeypatch.setattr(ShardWriter, "_write", write_half)
    with pytest.raises(RunError, match="no room on the disk"):
        merge_to_folder(adapter, tmp_path / "out", tiny_base)
    assert left_in(tmp_path) == {"adapter"}


def test_room_is_checked_before_anything_is_loaded(
    adapter: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(BaseWeights, "read", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(RunError, match=r"no room for .*out: 0\.07 GB are needed and 0\.00 GB are free"):
        merge_to_folder(adapter, tmp_path / "out", tiny_base)
    assert left_in(tmp_path) == {"adapter"}


def test_prompt_tuning_is_refused_before_anything_is_loaded(
    make_adapter: MakeAdapter, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(PromptTuningConfig(num_virtual_tokens=2))
    monkeypatch.setattr(BaseWeights, "read", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UnsupportedError, match="serve it unmerged"):
        merge_to_folder(adapter, tmp_path / "out", tiny_base)


def test_equivalence_figures_are_those_of_numpy(seed: int) -> None:
    wanted = [torch.randn(4, 7), torch.randn(2, 7)]
    found = [one + torch.randn_like(one) * 0.1 for one in wanted]
    a, b = (np.concatenate([one.numpy().astype(np.float64) for one in side]) for side in (wanted, found))
    figures = compare(wanted, found, limit=1.0)
    assert figures.max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-5)
    assert figures.mean_abs == pytest.approx(np.abs(a - b).mean(), rel=1e-5)
    assert figures.relative == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-5)
    assert figures.greedy_agreement == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert (figures.num_prompts, figures.num_tokens, figures.holds) == (2, 6, True)


def test_logits_that_are_not_numbers_never_hold() -> None:
    assert not compare([torch.ones(2, 3)], [torch.full((2, 3), float("nan"))], limit=1e9).holds


def test_limit_grows_with_the_coarsest_type() -> None:
    limits = [relative_limit([torch.float32, dtype], 30) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert limits == sorted(limits) and limits[0] < 2e-4 and limits[2] < 0.1


def test_probes_are_rows_of_both_example_sets() -> None:
    texts = probe_texts()
    assert len(texts) == 8
    assert (
        sum(text.startswith("Address: ") for text in texts) == sum(text.startswith("Review: ") for text in texts) == 4
    )


CONFIGS = {
    "lora": LoraConfig(r=4, alpha=8),
    "rslora": LoraConfig(r=4, alpha=8, targets=["q_proj", "down_proj"], variant="rslora"),
    "patterns": LoraConfig(r=4, alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3}),
    "prompt": PromptTuningConfig(num_virtual_tokens=5),
    "ptuning_v2": PTuningV2Config(num_virtual_tokens=5),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_the_exported_folder_and_gives_the_same_logits(
    name: str, make_adapter: MakeAdapter, tiny_base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(CONFIGS[name])
    exported = export_peft(adapter, tmp_path / "out", base_name=str(tiny_base))
    assert left_in(tmp_path / "out") == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert exported.uid == json.loads((adapter / "peftkit.json").read_text())["uid"]
    model, _ = load_base(tiny_base)
    ids = torch.randint(3, 259, (2, 20))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = theirs.eval()(ids, attention_mask=torch.ones_like(ids)).logits[:, -20:]
        wanted = peftkit.load_adapter(model, adapter)(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_export_names_the_base_it_is_told_or_the_recorded_one(
    adapter: Path, tiny_base: Path, tmp_path: Path
) -> None:
    kept, given = export_peft(adapter, tmp_path / "a"), export_peft(adapter, tmp_path / "b", base_name="org/model")
    assert (named_base(kept), named_base(given)) == (str(tiny_base), "org/model")
    assert transformers_name(str(tiny_base)) == str(tiny_base)
    assert transformers_name("org/model") == "org/model"
    with pytest.raises(BaseModelError):
        transformers_name("/not/here")


def test_what_peft_does_not_have_is_not_exported(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="HF PEFT has no bottleneck adapters"):
        export_peft(make_adapter(BottleneckConfig()), tmp_path / "out")
    assert left_in(tmp_path) == {"adapter"}


def test_an_export_that_fails_leaves_nothing(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapter_export.safetensors.torch, "save_file", full)
    with pytest.raises(RunError, match="no room on the disk"):
        export_peft(adapter, tmp_path / "out")
    assert left_in(tmp_path) == {"adapter"}
