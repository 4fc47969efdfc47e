"""HF PEFT beside us on the same tiny model: files both ways, logits, and gradients."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.artifact import load_adapter, read_adapter, save_adapter
from peftkit.methods import LoraConfig, MethodConfig, PromptTuningConfig, attach, attached, detach

LORA_CASES = {
    "all-linear": (LoraConfig(r=4, alpha=8), {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rslora-list": (
        LoraConfig(r=4, alpha=8, targets=["q_proj", "down_proj"], variant="rslora"),
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    ),
    "patterns": (
        LoraConfig(r=4, alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3}),
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "rank_pattern": {"k_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
        },
    ),
    "one-layer-regex": (
        LoraConfig(r=3, alpha=3, targets=r".*layers\.1\..*(gate|up)_proj"),
        {"r": 3, "lora_alpha": 3, "target_modules": r".*layers\.1\..*(gate|up)_proj"},
    ),
    "layers": (
        LoraConfig(r=2, alpha=2, targets=["o_proj"], layers_to_transform=[0]),
        {"r": 2, "lora_alpha": 2, "target_modules": ["o_proj"], "layers_to_transform": [0]},
    ),
    "exclude": (
        LoraConfig(r=2, alpha=2, targets=["q_proj", "v_proj"], exclude=["layers.0.self_attn.v_proj"]),
        {
            "r": 2,
            "lora_alpha": 2,
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": ["layers.0.self_attn.v_proj"],
        },
    ),
}


def tiny_llama(weights_seed: int) -> PreTrainedModel:
    torch.manual_seed(weights_seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def randomise(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("case", LORA_CASES)
def test_peft_loads_our_lora_and_gives_the_same_logits(tmp_path: Path, seed: int, case: str) -> None:
    config, _ = LORA_CASES[case]
    model = attach(tiny_llama(seed), config)
    randomise(model)
    ids = torch.randint(1, 97, (2, 9))
    ours = model(input_ids=ids).logits
    save_adapter(model, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny_llama(seed), str(tmp_path / "a")).eval()
    torch.testing.assert_close(theirs(input_ids=ids).logits, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", LORA_CASES)
def test_we_load_pefts_lora_and_give_the_same_logits(tmp_path: Path, seed: int, case: str) -> None:
    _, settings = LORA_CASES[case]
    theirs = peft.get_peft_model(tiny_llama(seed), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    randomise(theirs)
    ids = torch.randint(1, 97, (2, 9))
    expected = theirs(input_ids=ids).logits
    theirs.save_pretrained(tmp_path / "a")
    model = load_adapter(tiny_llama(seed), tmp_path / "a")
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_peft_loads_our_prompt_and_gives_the_same_logits(tmp_path: Path, seed: int) -> None:
    model = attach(tiny_llama(seed), PromptTuningConfig(num_virtual_tokens=5))
    randomise(model)
    ids = torch.randint(1, 97, (2, 9))
    ours = model(input_ids=ids).logits
    save_adapter(model, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny_llama(seed), str(tmp_path / "a")).eval()
    torch.testing.assert_close(theirs(input_ids=ids).logits[:, 5:], ours, atol=1e-5, rtol=1e-5)


def test_we_load_pefts_prompt_and_give_the_same_logits(tmp_path: Path, seed: int) -> None:
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    theirs = peft.get_peft_model(tiny_llama(seed), settings).eval()
    ids = torch.randint(1, 97, (2, 9))
    expected = theirs(input_ids=ids).logits[:, 5:]
    theirs.save_pretrained(tmp_path / "a")
    model = load_adapter(tiny_llama(seed), tmp_path / "a")
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (
            LoraConfig(r=4, alpha=8),
            peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"),
        ),
        (
            PromptTuningConfig(num_virtual_tokens=5),
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        ),
    ],
    ids=["lora", "prompt"],
)
def test_gradients_equal_pefts(tmp_path: Path, seed: int, config: MethodConfig, settings: peft.PeftConfig) -> None:
    theirs = peft.get_peft_model(tiny_llama(seed), settings).train()
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "a")
    model = load_adapter(tiny_llama(seed), tmp_path / "a", trainable=True).train()
    ids, labels = torch.randint(1, 97, (3, 11)), torch.randint(1, 97, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels[0, 7:] = -100
    # PEFT also has the last virtual token predict the first of the text, which is never a completion's
    labels[:, 0] = -100
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    reference = theirs(input_ids=ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, reference, atol=1e-6, rtol=1e-6)
    loss.backward()
    reference.backward()
    (method,) = attached(model)
    by_name = {
        name.replace(".default", "").replace("prompt_encoder.embedding.weight", "prompt_embeddings"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in method.parameters().items():
        expected = by_name[name]
        assert parameter.grad is not None and expected is not None
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("config", [LoraConfig(r=4), PromptTuningConfig(num_virtual_tokens=5)], ids=lambda c: c.kind)
def test_an_adapter_keeps_its_uid_through_both_libraries(tmp_path: Path, seed: int, config: MethodConfig) -> None:
    model = attach(tiny_llama(seed), config)
    randomise(model)
    uid = save_adapter(model, tmp_path / "ours").uid
    theirs = peft.PeftModel.from_pretrained(tiny_llama(seed), str(tmp_path / "ours"))
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_adapter(tmp_path / "theirs").uid == uid
    assert read_adapter(tmp_path / "theirs", config=detach(model).config).uid == uid
