"""Adapters at the ends of the decoder (LoRA, whole matrices, token rows) against HF PEFT, mixed in one batch."""

import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from peftkit.base import BaseInfo
from peftkit.errors import UnsupportedError
from peftkit.methods.lora import LoraSite
from peftkit_serve.adapters.packing import PackedAdapter, pack_lora
from peftkit_serve.plan import Chunk, Sample
from peftkit_serve.request import SamplingParams
from peftkit_serve.runner import Runner

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS = {"model.embed_tokens": [3, 60, 41, 7]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "head-dora": {"target_modules": ["lm_head", "up_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "rank_pattern": {"lm_head": 6}},
    "saved-head": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "saved-embedding": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["k_proj"], "trainable_token_indices": TOKENS["model.embed_tokens"]},
    "tokens-apart": {
        "target_modules": ["down_proj"],
        "trainable_token_indices": {"embed_tokens": [3, 60, 41, 7], "lm_head": [5]},
    },
}


def peft_model(folder: Path, settings: dict[str, Any], generator: torch.Generator) -> peft.PeftModel:
    """A LoRA by HF PEFT with random weights wherever it has any."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn(parameter.shape, generator=generator) * 0.2
    assert isinstance(tuned, peft.PeftModel)
    return tuned


def packed(tuned: peft.PeftModel, settings: dict[str, Any], runner: Runner) -> PackedAdapter:
    state = peft.get_peft_model_state_dict(tuned, save_embedding_layers=False)
    tensors = {key: value.clone() for key, value in state.items() if ".base_layer." not in key}
    sites = {
        path.removeprefix("base_model.model."): LoraSite(module.r["default"], module.scaling["default"], 0, 0)
        for path, module in tuned.named_modules()
        if isinstance(module, LoraLayer)
    }
    indices = settings.get("trainable_token_indices", {})
    token_ids = TOKENS | {"lm_head": indices["lm_head"]} if isinstance(indices, dict) and indices else TOKENS
    return pack_lora(
        tensors, sites, runner.spec, base_linear=runner.base_linear, token_ids=token_ids if indices else {}
    )


def chunk(name: str, tokens: list[int], start: int, end: int, table: tuple[int, ...], slot: int) -> Chunk:
    return Chunk(name, tuple(tokens[start:end]), start, table, slot, 0, Sample(SamplingParams(), 0, 0))


@torch.inference_mode()
def logits(runner: Runner, chunks: list[Chunk]) -> Tensor:
    batch = runner._batch(chunks)
    return runner._decoder.logits(runner._decoder.forward(batch, runner._kv), batch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
def test_rows_of_every_adapter_have_the_logits_of_hf_peft_and_the_bits_of_their_solo_run(
    seed: int, tmp_path: Path, tied: bool, deterministic: bool
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    runner = Runner(BaseInfo("tiny", tmp_path), device="cpu", num_pages=64, num_slots=10, deterministic=deterministic)
    tuned = {name: peft_model(tmp_path, settings, generator) for name, settings in ADAPTERS.items()}
    slots = dict(zip(tuned, rng.sample(range(10), len(tuned)), strict=True))
    for name in rng.sample(list(tuned), len(tuned)):
        runner.memory.load(slots[name], packed(tuned[name], ADAPTERS[name], runner))
    runner.memory.check_integrity()
    texts = {name: [rng.choice([3, 60, 5, rng.randrange(67)]) for _ in range(rng.randint(1, 40))] for name in tuned}
    texts["bare"] = [rng.randrange(67) for _ in range(20)]
    done, tables = dict.fromkeys(texts, 0), {name: tuple(range(4 * n, 4 * n + 4)) for n, name in enumerate(texts)}
    bare = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        exact = {name: tuned.get(name, bare)(input_ids=torch.tensor([text])).logits[0] for name, text in texts.items()}
    while waiting := [name for name in texts if done[name] < len(texts[name])]:
        step = rng.sample(waiting, rng.randint(1, len(waiting)))
        ends = {name: rng.choice([done[name] + 1, rng.randint(done[name] + 1, len(texts[name]))]) for name in step}
        rows = logits(
            runner,
            [chunk(name, texts[name], done[name], ends[name], tables[name], slots.get(name, -1)) for name in step],
        )
        for name, row in zip(step, rows, strict=True):
            done[name] = ends[name]
            torch.testing.assert_close(row, exact[name][ends[name] - 1], atol=1e-4, rtol=0)
            if deterministic:
                alone = chunk(name, texts[name], 0, ends[name], (60, 61, 62), slots.get(name, -1))
                assert torch.equal(logits(runner, [alone])[0], row), name
    for slot in slots.values():
        runner.memory.free(slot)
    runner.memory.check_integrity()
    assert not any(runner.memory.extras)


def test_what_an_end_has_stays_whole_when_extents_are_slid_together(seed: int, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    runner = Runner(BaseInfo("tiny", tmp_path), device="cpu", num_pages=8, num_slots=3, adapter_bytes=8 * 65536)
    kept = packed(peft_model(tmp_path, ADAPTERS["both"], generator), ADAPTERS["both"], runner)
    runner.memory.load(0, packed(peft_model(tmp_path, ADAPTERS["tokens"], generator), ADAPTERS["tokens"], runner))
    runner.memory.load(1, kept)
    text = chunk("x", [3, 60, 41], 0, 3, (0,), 1)
    before = logits(runner, [text])
    runner.memory.free(0)
    runner.memory._slide_together()
    runner.memory.check_integrity()
    assert torch.equal(logits(runner, [text]), before)


def test_a_scaled_embedding_and_rows_of_no_known_token_are_refused_by_name(seed: int, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    generator, runner = torch.Generator().manual_seed(seed), Runner(BaseInfo("x", tmp_path), device="cpu", num_pages=8)
    settings: dict[str, Any] = {"target_modules": ["embed_tokens"], "use_dora": True}
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.lora_magnitude_vector can't be served"):
        packed(peft_model(tmp_path, settings, generator), settings, runner)
    tuned = peft_model(tmp_path, ADAPTERS["tokens"], generator)
    with pytest.raises(UnsupportedError, match=r"trainable_tokens_delta can't be served"):
        packed(tuned, {}, runner)
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}
    with pytest.raises(UnsupportedError, match=r"mlp\.up_proj\.weight can't be served"):
        packed(peft_model(tmp_path, settings, generator), settings, runner)


def test_dora_of_a_row_of_zeros_is_finite(seed: int, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    base = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        base.get_input_embeddings().weight[2] = 0.0
    base.save_pretrained(tmp_path)
    runner = Runner(BaseInfo("tiny", tmp_path), device="cpu", num_pages=8, num_slots=1)
    settings: dict[str, Any] = {"target_modules": ["lm_head"], "use_dora": True}
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=2, **settings))
    assert isinstance(tuned, peft.PeftModel)
    packed_head = packed(tuned, settings, runner).layers[-1].weights
    assert torch.isfinite(packed_head).all()
