"""What `accelerate launch` may say, and what the recipe alone decides."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from peftkit.errors import InputError
from peftkit.recipe import Recipe
from peftkit.train import train

MakeRecipe = Callable[..., Recipe]


def outcome(out: Path) -> tuple[bytes, list[float]]:
    """The adapter's bits and the gradients' norms before clipping."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return (out / "adapter_model.safetensors").read_bytes(), [line["grad_norm"] for line in lines]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"), ("ACCELERATE_MIXED_PRECISION", "bf16")],
)
def test_settings_of_the_launcher_change_no_bit(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    # a norm about that of the gradients: a scaled one would be clipped otherwise
    clipped = {"max_grad_norm": 1.0, "lr": 5e-3}
    train(make_recipe(optim=clipped, out=str(tmp_path / "plain")))
    monkeypatch.setenv(variable, value)
    train(make_recipe(optim=clipped, out=str(tmp_path / "launched")))
    assert outcome(tmp_path / "launched") == outcome(tmp_path / "plain")


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ],
)
def test_a_launch_that_would_divide_the_model_is_refused(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    monkeypatch.setenv(variable, "true")
    recipe = make_recipe()
    with pytest.raises(InputError, match=rf"accelerate was told to use {name}.*launch with --multi_gpu"):
        train(recipe)
    assert not Path(recipe.out).exists()
