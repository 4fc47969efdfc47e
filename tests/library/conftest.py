"""Recipes on the tiny base that take a second or two."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.methods import attention as attention_by_bounds
from peftkit.recipe import Recipe


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
def make_recipe(tiny_base: Path, tmp_path: Path) -> Callable[..., Recipe]:
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
            "log": {"every": 1, "tensorboard": False, "samples": 0},
            "out": str(tmp_path / "run"),
        }
        for name, section in sections.items():
            content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
        return Recipe.model_validate(content)

    return make


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets attention on a CPU and float32 go by bounds."""
    monkeypatch.setattr(attention_by_bounds, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(attention_by_bounds, "_DTYPES", frozenset({torch.float32}))
    yield
    attention_by_bounds._say.cache_clear()


@pytest.fixture(scope="session")
def deep_base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base with five layers: more than are gathered at a time."""
    folder = tmp_path_factory.mktemp("deep") / "base"
    shutil.copytree(tiny_base, folder)
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_base, num_hidden_layers=5)).save_pretrained(folder)
    return folder
