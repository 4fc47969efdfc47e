"""PiSSA and LoftQ: what they start from, where training leaves them on disk, and LoRA+."""

import math
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from peftkit.artifact import load_adapter, read_adapter, save_adapter
from peftkit.base import load_base
from peftkit.errors import InputError
from peftkit.methods import LoraConfig, attach, attached, detach
from peftkit.methods.frozen import dequantized
from peftkit.methods.lora import Lora
from peftkit.methods.lora_init import principal
from peftkit.methods.lora_layers import LoraLayer


def lora_layers(model: PreTrainedModel) -> dict[str, LoraLayer]:
    (method,) = attached(model)
    assert isinstance(method, Lora)
    return {path: layer for path, layer in method.layers.items() if isinstance(layer, LoraLayer)}


def best(matrix: torch.Tensor, r: int) -> torch.Tensor:
    """The nearest matrix of rank r, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (left[:, :r] * values[:r]) @ right[:r]


def train_a_little(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in attached(model)[0].parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.02)


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (12, 300)])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_principal_factors_are_those_of_a_singular_value_decomposition(
    seed: int, shape: tuple[int, int], scale: float
) -> None:
    # singular values that fall as those of weights do, and slowly as those of rounding errors
    left, right = (torch.linalg.qr(torch.randn(n, min(shape), dtype=torch.float64)).Q for n in shape)
    for values in (0.8 ** torch.arange(min(shape)), 1 / torch.arange(1, min(shape) + 1)):
        matrix = (left * values) @ right.T
        A, B = principal(matrix.float(), 8, scale, torch.Generator().manual_seed(seed))
        exact = best(matrix, 8)
        error = (scale * B.double() @ A.double() - matrix).norm() / (exact - matrix).norm()
        assert error < 1.01
        torch.testing.assert_close(A.norm(dim=1), B.norm(dim=0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("variant", ["plain", "rslora", "dora"])
def test_pissa_trains_the_principal_part_and_leaves_the_base_alone(seed: int, tiny_base: Path, variant: str) -> None:
    model, _ = load_base(tiny_base)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attach(model, LoraConfig(r=4, alpha=8, init="pissa", variant=variant), seed=seed)  # type: ignore[arg-type]
    for path, layer in lora_layers(model).items():
        weight = before[f"{path}.weight"]
        error = (layer.scale * layer.lora_B.double() @ layer.lora_A.double() - weight).norm()
        assert error < 1.01 * (best(weight, 4) - weight).norm(), path
    detach(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_loftq_starts_nearer_to_the_weights_before_rounding(seed: int, tiny_base: Path) -> None:
    original, _ = load_base(tiny_base)
    model, _ = load_base(tiny_base, quant="nf4")
    attach(model, LoraConfig(r=4, alpha=8, init="loftq"), seed=seed)
    for path, layer in lora_layers(model).items():
        weight = original.get_submodule(path).weight.double()
        rounded = dequantized(layer.weight).double()
        start = rounded + layer.scale * layer.lora_B.double() @ layer.lora_A.double()
        assert (start - weight).norm() < (rounded - weight).norm(), path
        assert (start - weight).norm() < 1.01 * (best(weight - rounded, 4) - (weight - rounded)).norm(), path
    ids = torch.randint(3, 259, (2, 24))
    with torch.no_grad():
        started = (model(ids).logits - original(ids).logits).norm()
        quantised = (detach(model)(ids).logits - original(ids).logits).norm()
    assert started < quantised


def test_loftq_without_its_base_at_hand_is_refused(seed: int, tiny_base: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_base)
    with pytest.raises(InputError, match="held in NF4"):
        attach(model, LoraConfig(r=4, init="loftq"))


@pytest.mark.parametrize("variant", ["plain", "rslora", "dora"])
def test_a_trained_pissa_adapter_is_a_plain_one_of_twice_the_rank_on_disk(
    seed: int, tiny_base: Path, tmp_path: Path, variant: str
) -> None:
    config = LoraConfig(
        r=4,
        alpha=6,
        init="pissa",
        variant=variant,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"o_proj": 3},  # type: ignore[arg-type]
    )
    model, _ = load_base(tiny_base)
    attach(model, config, seed=seed)
    train_a_little(model)
    ids = torch.randint(3, 259, (2, 24))
    wanted = model(ids).logits
    save_adapter(model, tmp_path / "a")
    saved = read_adapter(tmp_path / "a").config
    assert isinstance(saved, LoraConfig) and (saved.r, saved.rank_pattern, saved.init) == (8, {"k_proj": 4}, "default")
    assert math.isclose(saved.alpha, 6 * (math.sqrt(2) if variant == "rslora" else 2))
    load_adapter(detach(model), tmp_path / "a")
    torch.testing.assert_close(model(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_base), str(tmp_path / "a")).eval()
    torch.testing.assert_close(theirs(input_ids=ids).logits, wanted, atol=1e-5, rtol=1e-5)


def test_a_pissa_export_is_taken_back_whole(seed: int, tiny_base: Path) -> None:
    model, _ = load_base(tiny_base)
    attach(model, LoraConfig(r=4, alpha=6, init="pissa"), seed=seed)
    train_a_little(model)
    ids = torch.randint(3, 259, (2, 24))
    wanted, exported = model(ids).logits, attached(model)[0].export()
    attach(detach(model), LoraConfig(r=4, alpha=6, init="pissa"), seed=seed + 1)
    attached(model)[0].load(exported)
    assert torch.equal(model(ids).logits, wanted)


def test_lora_plus_raises_the_rate_of_b_alone(seed: int, tiny_base: Path) -> None:
    model, _ = load_base(tiny_base)
    attach(model, LoraConfig(r=4, lr_ratio=16.0, targets=["q_proj", "embed_tokens"]))
    (method,) = attached(model)
    factors = method.lr_factors()
    assert set(factors.values()) == {16.0}
    assert set(factors) == {name for name in method.parameters() if "lora_B" in name or "embedding_B" in name}
    attach(detach(model), LoraConfig(r=4))
    assert attached(model)[0].lr_factors() == {}
