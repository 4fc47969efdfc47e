"""A tiny random base with a tokenizer, adapter folders for it, and engines over it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peftkit.artifact import write_adapter
from peftkit.base import module_shapes
from peftkit.methods import LoraConfig, PromptTuningConfig
from peftkit_serve import Engine

CONTEXT = 160

CONFIG = LlamaConfig(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.4,  # spread enough that an adapter, or one wrong key, changes the tokens
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=256,
    pad_token_id=None,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", model_max_length=CONTEXT)


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with fresh random weights."""
    weights_seed = random.SystemRandom().randrange(2**31)
    print(f"weights of the tiny base: torch.manual_seed({weights_seed})")
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(weights_seed)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def lora_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a random LoRA with a large update and returns its folder."""

    def write(seed: int, r: int = 4, **fields: Any) -> Path:
        config = LoraConfig.model_validate({"r": r, "alpha": 2.0 * r} | fields)
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for path, site in config.resolve(module_shapes(CONFIG)).items():
            for side, shape in (("A", (site.r, site.in_features)), ("B", (site.out_features, site.r))):
                tensors[f"base_model.model.{path}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.2
        return write_adapter(tmp_path / f"lora-{seed}-{r}", config, tensors, {}).path

    return write


@pytest.fixture
def prompt_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random virtual tokens and returns their folder."""

    def write(seed: int, num_virtual: int = 20) -> Path:
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn(num_virtual, CONFIG.hidden_size, generator=generator)
        config = PromptTuningConfig(num_virtual_tokens=num_virtual, init="random")
        return write_adapter(tmp_path / f"prompt-{seed}", config, {"prompt_embeddings": embeddings}, {}).path

    return write


@pytest.fixture
def make_engine(base_folder: Path) -> Iterator[Callable[..., Engine]]:
    """Makes a small deterministic engine on the CPU; at the end every one must be whole."""
    engines: list[Engine] = []

    def make(base: Path = base_folder, **settings: Any) -> Engine:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "max_tokens_per_step": 32,
            "max_requests": 8,
            "max_adapters": 2,
            "num_pages": 64,
            "deterministic": True,
        }
        engines.append(Engine(base, **(defaults | settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
