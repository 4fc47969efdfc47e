"""GGUF bases: converted once, exactly, whole or not at all; damage is noticed and mended."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peftkit.base import EMBEDDED, cache_dir, convert, load_base, load_tokenizer, resolve_base
from peftkit.chat import render_chat
from peftkit.errors import BaseModelError, RunError

CONFIG = LlamaConfig(
    vocab_size=261,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of rows: rotary pairs side by side, not half a head apart."""
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", kind: str = "model") -> Path:
    """The model as llama.cpp would write it in F32, with a byte tokenizer and ChatML."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e", "l l"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            weight = permuted(weight, heads[ours]) if ours in heads else weight
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(seed: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture
def file(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", model)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were written, one entry a conversion."""
    written: list[Path] = []
    write = convert._write
    monkeypatch.setattr(convert, "_write", lambda source, folder: written.append(folder) or write(source, folder))
    return written


def test_the_converted_base_gives_the_logits_of_the_model_that_was_written(file, model, seed):
    loaded, tokenizer = load_base(file, device="cpu")
    ids = torch.randint(0, CONFIG.vocab_size, (2, 11))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert tokenizer.encode("hell<|im_end|>") == [259, 260, 2]
    assert tokenizer.model_max_length == CONFIG.max_position_embeddings


def test_the_converted_folder_is_complete_and_says_where_it_comes_from(file):
    info = resolve_base(file)
    assert info.name == str(file)
    assert info.path.parent == cache_dir() / "bases"
    record = json.loads((info.path / "provenance.json").read_text())
    assert record["source"]["file"] == str(file) and record["dtype"] == "float32"
    assert info.path.name == f"tiny-{record['source']['sha256'][:12]}"
    config = json.loads((info.path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert "_model_name_or_path" not in config and "quantization_config" not in config
    tokenizer = load_tokenizer(info)
    assert tokenizer.decode(render_chat(tokenizer, [{"role": "user", "content": "he"}], False)).startswith(
        "<|im_start|>"
    )
    assert (info.path / "generation_config.json").is_file()


def test_a_file_is_converted_once_wherever_it_lies(file, conversions, tmp_path):
    first = resolve_base(file)
    copy = Path(shutil.copy(file, tmp_path / "tiny.GGUF"))
    assert resolve_base(file).path == first.path
    assert resolve_base(copy).path == first.path
    assert len(conversions) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "provenance.json"])
def test_a_lost_file_of_the_cache_is_made_again(file, conversions, name):
    first = resolve_base(file)
    before = first.fingerprint
    (first.path / name).unlink()
    again = resolve_base(file)
    assert (again.path / name).is_file() and again.fingerprint == before
    assert len(conversions) == 2


def test_a_changed_byte_in_the_cache_is_noticed_and_mended(file, conversions, seed):
    weights = resolve_base(file).path / "model.safetensors"
    good = weights.read_bytes()
    place = int(torch.randint(len(good) - 1000, len(good), ()).item())
    weights.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    assert resolve_base(file).path / "model.safetensors" == weights
    assert weights.read_bytes() == good and len(conversions) == 2


def test_a_conversion_that_fails_leaves_nothing_behind(file, monkeypatch, tmp_path):
    monkeypatch.setenv("PEFTKIT_HOME", str(tmp_path / "home"))

    def fail(source, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "_write", fail)
    with pytest.raises(RunError, match=r"No space left on device.*PEFTKIT_HOME"):
        resolve_base(file)
    assert [path.suffix for path in (cache_dir() / "bases").iterdir()] == [".lock"]


def test_what_a_killed_conversion_left_is_swept_up(file):
    info = resolve_base(file)
    shutil.rmtree(info.path)
    left = info.path.with_name(f".{info.path.name}.abc")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    resolve_base(file)
    assert info.path.is_dir() and not left.exists()


def test_too_little_room_is_one_line_with_both_numbers(file, monkeypatch, conversions):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    with pytest.raises(BaseModelError, match=r"needs 0\.07 GB and 0\.01 GB are free; PEFTKIT_HOME"):
        resolve_base(file)
    assert conversions == []


def test_a_truncated_file_is_refused(file, seed):
    whole = file.read_bytes()
    for length in (0, 3, 40, len(whole) // 3, len(whole) - 8):
        file.write_bytes(whole[:length])
        with pytest.raises(BaseModelError, match="not a whole GGUF file"):
            resolve_base(file)


def test_another_architecture_is_refused_by_name(model, tmp_path):
    with pytest.raises(BaseModelError, match="architecture mamba isn't supported; supported are llama"):
        resolve_base(write_gguf(tmp_path / "x.gguf", model, architecture="mamba"))


def test_an_adapter_file_is_not_a_base(model, tmp_path):
    with pytest.raises(BaseModelError, match="type is adapter"):
        resolve_base(write_gguf(tmp_path / "x.gguf", model, kind="adapter"))


def test_two_processes_that_ask_at_once_convert_once(file, tmp_path):
    command = [sys.executable, "-m", "peftkit.cli.main", "base", "fetch", str(file), "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert len({json.loads(out)["path"] for out, _ in results}) == 1
    assert sum(err.count("converting tiny.gguf once") for _, err in results) == 1


@pytest.mark.slow
def test_the_embedded_base_is_the_small_language_model_it_says_it_is(embedded_cache):
    base = EMBEDDED["smollm2-135m"]
    if base.gguf() is None:
        pytest.skip(base.install)
    info = resolve_base("smollm2-135m")
    assert (info.path / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert json.loads((info.path / "provenance.json").read_text())["source"]["sha256"] == base.sha256
    loaded, tokenizer = load_base(info, device="cpu")
    assert (loaded.config.num_hidden_layers, loaded.config.hidden_size, tokenizer.model_max_length) == (30, 576, 8192)
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    answer = loaded.generate(prompt, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(answer) == " Paris"
    plain = AutoModelForCausalLM.from_pretrained(info.path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=prompt).logits, plain(input_ids=prompt).logits)
