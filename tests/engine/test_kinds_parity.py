"""Every kind of adapter in one batch against transformers with peftkit's methods, for each family of bases."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from peftkit.artifact import load_adapter
from peftkit_serve import Engine, Request, SamplingParams

WINDOW = 40
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral-window": MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=12),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def make_base(config: PretrainedConfig, tokenizer_folder: Path, folder: Path) -> Path:
    """A random model with random biases."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def answer_logits(folder: Path, adapter: Path | None, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits that each token of an answer is drawn from, of one forward over prompt and answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        load_adapter(model, adapter)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[-len(answer) - 1 : -1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_in_one_batch_has_the_logits_of_its_method_in_transformers(
    base_folder: Path,
    make_engine: Callable[..., Engine],
    every_kind: Callable[..., dict[str, Path]],
    record_logits: Callable[[Engine], dict[tuple[str, int], torch.Tensor]],
    tmp_path: Path,
    seed: int,
    family: str,
    deterministic: bool,
) -> None:
    config, rng = FAMILIES[family], random.Random(seed)
    base = make_base(config, base_folder, tmp_path / "base")
    engine = make_engine(base, deterministic=deterministic, max_adapters=8, max_requests=16, num_pages=128)
    folders: dict[str | None, Path | None] = {**every_kind(seed, config), None: None}
    for name, folder in folders.items():
        if name is not None:
            engine.adapters.add(name, folder)
    logits, requests = record_logits(engine), []
    for name in rng.sample(list(folders), len(folders)):
        # embedded virtual tokens are in transformers' sight only as far as its window reaches
        longest = WINDOW - engine.adapters.get(name).num_virtual - 6 if name in ("prompt", "ptuning") else 60
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, max(1, longest)))]
        requests.append(Request(prompt, name, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    outputs = {output.request_id: output for output in engine.generate(requests)}
    for request in requests:
        answer = list(outputs[request.request_id].token_ids)
        exact = answer_logits(base, folders[request.adapter], request.prompt, answer)  # type: ignore[arg-type]
        ours = torch.stack([logits[request.request_id, step] for step in range(6)])
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0, msg=lambda text, r=request: f"{r.adapter}: {text}")
