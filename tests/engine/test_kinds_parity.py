"""Every kind of adapter in one batch against transformers with peftkit's methods, for each family of bases."""

import random
from collections.abc import Callable
from functools import partial
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

from peftkit_serve import Engine, Request, SamplingParams

WINDOW = 40
ENDS = ("ends", "saved-head", "saved-embedding", "tokens", "tokens-apart")
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
TIED = SIZES | {"tie_word_embeddings": True}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": LlamaConfig(**TIED),
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


PLACES = [
    *(("cpu-float32", family, deterministic) for family in FAMILIES for deterministic in (False, True)),
    ("cpu-bfloat16", "llama", False),
    ("cpu-bfloat16", "llama-biases", True),
    *(pytest.param("cuda-bfloat16", family, False, marks=pytest.mark.gpu) for family in FAMILIES),
    pytest.param("cuda-bfloat16", "llama-biases", True, marks=pytest.mark.gpu),
    pytest.param("cuda-float32", "llama", False, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("compute", "family", "deterministic"), PLACES, indirect=["compute"])
def test_every_kind_in_one_batch_has_the_logits_of_its_method_in_transformers(
    base_folder: Path,
    make_engine: Callable[..., Engine],
    every_kind: Callable[..., dict[str, Path]],
    record_logits: Callable[[Engine], dict[tuple[str, int], torch.Tensor]],
    assert_served: Callable[..., None],
    method_model: Callable[[Path, Path | None, torch.dtype], PreTrainedModel],
    tmp_path: Path,
    seed: int,
    compute: str,
    family: str,
    deterministic: bool,
) -> None:
    """Kinds that change the embeddings come later, beside some others: a step with one of them is no CUDA graph."""
    config, rng = FAMILIES[family], random.Random(seed)
    base = make_base(config, base_folder, tmp_path / "base")
    engine = make_engine(
        base, device=compute, deterministic=deterministic, max_adapters=16, max_requests=18, num_pages=128
    )
    folders = every_kind(seed, config)
    for name, folder in folders.items():
        engine.adapters.add(name, folder)
    logits = record_logits(engine)

    def ask(name: str | None) -> Request:
        # embedded virtual tokens are in transformers' sight only as far as its window reaches
        longest = WINDOW - engine.adapters.get(name).num_virtual - 6 if name in ("prompt", "ptuning") else 60
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, max(1, longest)))]
        return Request(prompt, name, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))

    others = [name for name in (None, *folders) if name not in ENDS]
    for names in (others, [*ENDS, *rng.sample(others, 3)]):
        requests = [ask(name) for name in rng.sample(names, len(names))]
        outputs = {output.request_id: output for output in engine.generate(requests)}
        for request in requests:
            assert_served(
                request,
                outputs[request.request_id],
                logits,
                partial(method_model, base, folders.get(request.adapter or "")),
            )
