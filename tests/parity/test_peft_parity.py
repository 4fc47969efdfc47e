"""HF PEFT beside us on the same tiny model: files both ways, logits, and gradients."""

import json
import re
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.artifact import load_adapter, read_adapter, save_adapter
from peftkit.methods import (
    LoraConfig,
    MethodConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    attach,
    attached,
    detach,
)

LORA_CASES = {
    "all-linear": (LoraConfig(r=4, alpha=8), {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "dora": (
        LoraConfig(r=4, alpha=8, variant="dora", targets=["q_proj", "up_proj"]),
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_dora": True},
    ),
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
    "both-embeddings": (
        LoraConfig(r=3, alpha=6, targets=["embed_tokens", "lm_head", "v_proj"], rank_pattern={"embed_tokens": 2}),
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["embed_tokens", "lm_head", "v_proj"],
            "rank_pattern": {"embed_tokens": 2},
        },
    ),
    "dora-output-embedding": (
        LoraConfig(r=3, alpha=6, targets=["lm_head", "k_proj"], variant="dora"),
        {"r": 3, "lora_alpha": 6, "target_modules": ["lm_head", "k_proj"], "use_dora": True},
    ),
    "bias": (
        LoraConfig(r=3, alpha=6, targets=["q_proj", "lm_head"], lora_bias=True),
        {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "lm_head"], "lora_bias": True},
    ),
    "saved-modules": (
        LoraConfig(r=2, alpha=2, targets=["o_proj"], modules_to_save=["lm_head", "norm", "0.mlp.up_proj"]),
        {
            "r": 2,
            "lora_alpha": 2,
            "target_modules": ["o_proj"],
            "modules_to_save": ["lm_head", "norm", "0.mlp.up_proj"],
        },
    ),
    "saved-embedding": (
        LoraConfig(r=2, alpha=2, targets=["lm_head"], modules_to_save=["embed_tokens"]),
        {"r": 2, "lora_alpha": 2, "target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    ),
    "tokens": (
        LoraConfig(r=2, alpha=2, targets=["q_proj"], trainable_token_indices=[90, 3, 41]),
        {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "trainable_token_indices": [90, 3, 41]},
    ),
    "tokens-apart": (
        LoraConfig(r=2, alpha=2, targets=["q_proj"], trainable_token_indices={"embed_tokens": [90, 3], "lm_head": [7]}),
        {
            "r": 2,
            "lora_alpha": 2,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [90, 3], "lm_head": [7]},
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


PROMPT_CASES: dict[str, tuple[MethodConfig, peft.PeftConfig]] = {
    "prompt": (
        PromptTuningConfig(num_virtual_tokens=5),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    ),
    "ptuning-mlp": (
        PTuningConfig(num_virtual_tokens=5, encoder_hidden_size=12),
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=12),
    ),
    "ptuning-lstm": (
        PTuningConfig(num_virtual_tokens=5, encoder="lstm", encoder_hidden_size=12),
        peft.PromptEncoderConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=5,
            encoder_hidden_size=12,
            encoder_reparameterization_type="LSTM",
        ),
    ),
    "ptuning_v2": (
        PTuningV2Config(num_virtual_tokens=5, init="random"),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    ),
    "prefix": (
        PrefixTuningConfig(num_virtual_tokens=5, init="random", encoder_hidden_size=12),
        peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=12
        ),
    ),
}


def text_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """PEFT returns logits for virtual tokens in the input too."""
    return model(input_ids=ids).logits[:, -ids.shape[1] :]


@pytest.mark.parametrize("case", PROMPT_CASES)
def test_peft_loads_our_virtual_tokens_and_gives_the_same_logits(tmp_path: Path, seed: int, case: str) -> None:
    config, _ = PROMPT_CASES[case]
    model = attach(tiny_llama(seed), config)
    randomise(model)
    ids = torch.randint(1, 97, (2, 9))
    ours = model(input_ids=ids).logits
    save_adapter(model, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny_llama(seed), str(tmp_path / "a")).eval()
    torch.testing.assert_close(text_logits(theirs, ids), ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", PROMPT_CASES)
def test_we_load_pefts_virtual_tokens_and_give_the_same_logits(tmp_path: Path, seed: int, case: str) -> None:
    config, settings = PROMPT_CASES[case]
    theirs = peft.get_peft_model(tiny_llama(seed), settings).eval()
    ids = torch.randint(1, 97, (2, 9))
    expected = text_logits(theirs, ids)
    theirs.save_pretrained(tmp_path / "a")
    model = load_adapter(tiny_llama(seed), tmp_path / "a")
    assert attached(model)[0].config.kind == config.kind
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", PROMPT_CASES)
def test_the_same_config_fields_are_written(tmp_path: Path, seed: int, case: str) -> None:
    config, settings = PROMPT_CASES[case]
    save_adapter(attach(tiny_llama(seed), config), tmp_path / "ours")
    peft.get_peft_model(tiny_llama(seed), settings).save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    unset = {"encoder_hidden_size"} if case == "ptuning_v2" else set()
    assert {k: v for k, v in ours.items() if k not in unset} == {k: v for k, v in theirs.items() if k not in unset}


@pytest.mark.parametrize("case", PROMPT_CASES)
def test_gradients_of_virtual_tokens_equal_pefts(seed: int, case: str) -> None:
    config, settings = PROMPT_CASES[case]
    theirs = peft.get_peft_model(tiny_llama(seed), settings).train()
    model = attach(tiny_llama(seed), config).train()
    randomise(theirs)
    reference = {
        name.partition("prompt_encoder.default.")[2]: parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    table = case in ("prompt", "ptuning_v2")
    ours = {"embedding.weight" if table else n: p for n, p in attached(model)[0].parameters().items()}
    assert set(ours) == set(reference)
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(reference[name])
    ids, labels = torch.randint(1, 97, (3, 11)), torch.randint(1, 97, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels[0, 7:] = -100
    # PEFT also has the last virtual token predict the first of the text, which is never a completion's
    labels[:, 0] = -100
    losses = [m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (model, theirs)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    for loss in losses:
        loss.backward()
    for name, parameter in ours.items():
        grad, expected = parameter.grad, reference[name].grad
        assert grad is not None and expected is not None
        assert (grad - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("case", LORA_CASES)
def test_gradients_of_lora_equal_pefts(tmp_path: Path, seed: int, case: str) -> None:
    theirs = peft.get_peft_model(
        tiny_llama(seed), peft.LoraConfig(task_type="CAUSAL_LM", **LORA_CASES[case][1])
    ).train()
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "a")
    model = load_adapter(tiny_llama(seed), tmp_path / "a", trainable=True).train()
    ids, labels = torch.randint(1, 97, (3, 11)), torch.randint(1, 97, (3, 11))
    losses = [m(input_ids=ids, labels=labels).loss for m in (model, theirs)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    for loss in losses:
        loss.backward()
    reference = {
        re.sub(r"\.default|\.modules_to_save", "", name).replace("magnitude_vector.weight", "magnitude_vector"): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    for name, parameter in attached(model)[0].parameters().items():
        grad, expected = parameter.grad, reference[name]
        assert grad is not None and expected is not None
        assert (grad - expected).norm() <= 1e-5 * expected.norm(), name


KEPT = [LORA_CASES["all-linear"][0], *[config for config, _ in PROMPT_CASES.values()]]


@pytest.mark.parametrize("config", KEPT, ids=lambda config: config.kind)
def test_an_adapter_keeps_its_uid_through_both_libraries(tmp_path: Path, seed: int, config: MethodConfig) -> None:
    model = attach(tiny_llama(seed), config)
    randomise(model)
    uid = save_adapter(model, tmp_path / "ours").uid
    theirs = peft.PeftModel.from_pretrained(tiny_llama(seed), str(tmp_path / "ours"))
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_adapter(tmp_path / "theirs").uid == uid
    assert read_adapter(tmp_path / "theirs", config=detach(model).config).uid == uid
