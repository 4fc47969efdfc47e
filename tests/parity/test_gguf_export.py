"""GGUF files of a tiny base, read by transformers and by the gguf library."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import peftkit
from peftkit.base import load_base
from peftkit.errors import UnsupportedError
from peftkit.merge import export_gguf, merge_to_folder
from peftkit.methods import LoraConfig, PromptTuningConfig, attached

RANKS = LoraConfig(r=4, alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3})
RSLORA = LoraConfig(r=4, alpha=8, variant="rslora", targets=["q_proj", "k_proj", "down_proj"])


def save(base: Path, folder: Path, config: Any) -> Path:
    model, _ = load_base(base)
    peftkit.attach(model, config)
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter, std=0.05)
    peftkit.save_adapter(model, folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
def test_transformers_reads_a_merged_gguf_of_every_family(
    family: str, dtype: str, seed: int, tiny_base: Path, tmp_path: Path
) -> None:
    sizes = {key: getattr(LlamaConfig.from_pretrained(tiny_base), key) for key in _SIZES}
    base = tmp_path / "base"
    # transformers takes a head of 128 for granted in a Qwen3 GGUF, whatever its file says
    head_dim = 128 if family == "qwen3" else 16
    config = AutoConfig.for_model(family, **sizes, head_dim=head_dim, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(base)
    adapter = save(base, tmp_path / "adapter", RANKS)
    report = merge_to_folder(adapter, tmp_path / "out", base, format="gguf", dtype=dtype, verify=False)
    file = tmp_path / "out" / {"float32": "model-f32.gguf", "q8_0": "model-q8_0.gguf"}[dtype]
    found = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    wanted = peftkit.merge(load_base(base)[0], [adapter])
    assert report.num_merged == 14 and report.kept == pytest.approx(1, abs={"float32": 1e-6, "q8_0": 0.02}[dtype])
    names = dict(wanted.named_parameters())
    assert dict(found.named_parameters()).keys() == names.keys()
    for name, parameter in found.named_parameters():
        # half a step, and a block's scale is itself rounded to float16: 127 · 2⁻¹² of it more
        step = 0 if dtype == "float32" or parameter.dim() == 1 else names[name].abs().max().item() / 127
        torch.testing.assert_close(parameter, names[name], rtol=0, atol=0.54 * step + 1e-6)


def test_the_context_of_a_gguf_ends_where_the_bases_window_does(
    seed: int, tiny_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for window, context, said in ((32, 32, True), (4096, 256, False), (None, 256, False)):
        base = other_base(tiny_base, tmp_path / f"base-{window}", "mistral", sliding_window=window)
        adapter = save(base, tmp_path / f"adapter-{window}", LoraConfig(r=2))
        caplog.clear()
        merge_to_folder(adapter, tmp_path / f"out-{window}", base, format="gguf", verify=False)
        field = gguf.GGUFReader(tmp_path / f"out-{window}" / "model-f16.gguf").get_field("llama.context_length")
        assert field is not None and field.contents() == context
        assert ("sliding window of 32 tokens" in caplog.text) == said


def test_an_activation_that_llama_cpp_lacks_is_refused(seed: int, tiny_base: Path, tmp_path: Path) -> None:
    base = other_base(tiny_base, tmp_path / "base", "llama", hidden_act="gelu")
    adapter = save(base, tmp_path / "adapter", LoraConfig(r=2))
    with pytest.raises(UnsupportedError, match="hidden_act gelu"):
        merge_to_folder(adapter, tmp_path / "out", base, format="gguf", verify=False)
    assert not (tmp_path / "out").exists()


def other_base(like: Path, folder: Path, family: str, **settings: Any) -> Path:
    """A random base of a family with the tiny base's sizes and tokenizer, and 256 positions."""
    sizes = {key: getattr(LlamaConfig.from_pretrained(like), key) for key in _SIZES} | {"max_position_embeddings": 256}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **settings)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    return folder


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def test_the_tokenizer_of_a_gguf_gives_the_same_tokens(seed: int, tiny_base: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base")
    content = json.loads((base / "tokenizer.json").read_text())
    content["model"]["merges"] = [["o", "k"], ["ok", "e"]]
    for token, bare in (("ok", "Ń"), ("oke", "ł")):
        content["model"]["vocab"][token] = content["model"]["vocab"].pop(bare)
    (base / "tokenizer.json").write_text(json.dumps(content))
    merge_to_folder(save(base, tmp_path / "a", RANKS), tmp_path / "out", base, format="gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model-f16.gguf")
    ours = AutoTokenizer.from_pretrained(base)
    text = "<|im_start|>user\nNaïve café, 12345 tokens?  <|im_end|>\n"
    assert theirs("token").input_ids == [
        *theirs("t").input_ids,
        content["model"]["vocab"]["oke"],
        *theirs("n").input_ids,
    ]
    assert theirs(text).input_ids == ours(text).input_ids
    assert theirs.chat_template == ours.chat_template and theirs.eos_token == ours.eos_token
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model-f16.gguf", "README.md", "peftkit_merge.json"}


@pytest.mark.parametrize("config", [RANKS, RSLORA], ids=["patterns", "rslora"])
def test_a_gguf_lora_holds_the_update_as_llama_cpp_scales_it(
    config: LoraConfig, seed: int, tiny_base: Path, tmp_path: Path
) -> None:
    adapter = save(tiny_base, tmp_path / "adapter", config)
    export_gguf(adapter, tmp_path / "out", tiny_base)
    reader = gguf.GGUFReader(tmp_path / "out" / "adapter-f32.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    merged = dict(peftkit.merge(load_base(tiny_base)[0], [adapter]).named_parameters())
    base = dict(LlamaForCausalLM.from_pretrained(tiny_base).named_parameters())
    for layer in (0, 1):
        A, B = (tensors[f"blk.{layer}.attn_k.weight.lora_{side}"] for side in "ab")
        update = B @ A * fields["adapter.lora.alpha"] / B.shape[1]
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        wanted = (merged[name] - base[name]).detach().numpy()
        # neighbours 2i and 2i + 1 of each of two heads of 16 are halves i and i + 8
        order = [head * 16 + half * 8 + i for head in range(2) for i in range(8) for half in range(2)]
        np.testing.assert_allclose(update, wanted[order], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LoraConfig(r=2, variant="dora"), "variant dora"),
        (LoraConfig(r=2, targets=["q_proj"], modules_to_save=["norm"]), "modules_to_save"),
        (LoraConfig(r=2, targets=["embed_tokens", "q_proj"]), "an update of model.embed_tokens"),
        (PromptTuningConfig(num_virtual_tokens=2), "no prompt adapters"),
    ],
)
def test_what_a_gguf_lora_cant_hold_is_refused_by_name(
    config: Any, named: str, seed: int, tiny_base: Path, tmp_path: Path
) -> None:
    adapter = save(tiny_base, tmp_path / "adapter", config)
    with pytest.raises(UnsupportedError, match=named):
        export_gguf(adapter, tmp_path / "out", tiny_base)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


def test_an_untied_merge_has_an_output_of_its_own(seed: int, tiny_base: Path, tmp_path: Path) -> None:
    adapter = save(tiny_base, tmp_path / "adapter", LoraConfig(r=2, targets=["lm_head"]))
    report = merge_to_folder(adapter, tmp_path / "out", tiny_base, format="gguf", dtype="float32")
    assert report.equivalence is not None and report.equivalence.relative < 1e-5
    assert "output.weight" in {tensor.name for tensor in gguf.GGUFReader(tmp_path / "out" / "model-f32.gguf").tensors}
