"""A tiny base with a byte tokenizer, and recipes on it that take a second or two."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peftkit.recipe import Recipe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ChatML, and as in many bases pad = eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, saved with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-base")
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps what peftkit remembers of the tiny base out of the user's cache."""
    monkeypatch.setenv("PEFTKIT_HOME", str(tmp_path_factory.getbasetemp() / "peftkit-home"))


def write_rows(path: Path, count: int, *, seed: int = 0) -> Path:
    """Rows of very unequal length: a word repeated, and its last letter as the completion, one to nine times."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        word = "".join(rng.choices("abcdefgh", k=rng.randint(2, 6)))
        rows.append({"prompt": word * rng.randint(1, 6), "completion": " " + word[-1] * rng.randint(1, 9)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def make_recipe(tiny_base: Path, tmp_path: Path, own_cache: None) -> Callable[..., Recipe]:
    """Makes a recipe over the tiny base with 24 training rows; sections are given as mappings."""

    def make(**sections: Any) -> Recipe:
        train = tmp_path / "train.jsonl"
        if not train.exists():
            write_rows(train, 24)
        content: dict[str, Any] = {
            "base": str(tiny_base),
            "quant": {"kind": "none"},
            "method": {"kind": "lora", "r": 4, "alpha": 8.0},
            "data": {"train": str(train), "max_length": 128},
            "optim": {"lr": 5e-3},
            "train": {"max_steps": 6, "batch_size": 4},
            "log": {"every": 1, "tensorboard": False},
            "out": str(tmp_path / "run"),
        }
        for name, section in sections.items():
            content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
        return Recipe.model_validate(content)

    return make
