"""Generation against references: transformers with peftkit's methods, and HF PEFT."""

import random
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.artifact import load_adapter
from peftkit_serve import Engine, Request, SamplingParams

MakeEngine = Callable[..., Engine]
Folder = Callable[..., Path]


def random_request(rng: random.Random, adapter: str | None, max_tokens: int) -> Request:
    """A greedy request of 1 to 40 random tokens."""
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    return Request(prompt, adapter, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", [None, "lora", "prompt", "prompt-whole-pages"])
def test_generation_equals_a_teacher_forced_forward_in_transformers(
    make_engine: MakeEngine,
    base_folder: Path,
    lora_folder: Folder,
    prompt_folder: Folder,
    seed: int,
    kind: str | None,
    deterministic: bool,
) -> None:
    engine = make_engine(max_tokens_per_step=8, deterministic=deterministic)  # long prompts go in chunks
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    if kind is not None:
        folder = {"lora": lora_folder, "prompt": prompt_folder}.get(kind, lambda s: prompt_folder(s, 32))(seed)
        engine.adapters.add("x", folder)
        load_adapter(model, folder)
    rng = random.Random(seed)
    requests = [random_request(rng, None if kind is None else "x", 25) for _ in range(4)]
    assert_teacher_forced(engine, model, requests)


PEFT_CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(
        r=5, use_rslora=True, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    ),
    "dora": lambda: peft.LoraConfig(
        r=5, use_dora=True, target_modules=["k_proj", "o_proj", "down_proj"], init_lora_weights=False
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7),
    "ptuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=17, encoder_hidden_size=9),
    "prefix": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=18, prefix_projection=True, encoder_hidden_size=9
    ),
    "ptuning_v2": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
}


@pytest.mark.parametrize("kind", PEFT_CONFIGS)
def test_adapters_that_hf_peft_wrote_generate_what_hf_peft_computes(
    make_engine: MakeEngine, base_folder: Path, tmp_path: Path, seed: int, kind: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model = peft.get_peft_model(base, PEFT_CONFIGS[kind]()).eval()
    model.save_pretrained(str(tmp_path / "peft"))
    engine = make_engine()
    engine.adapters.add("x", tmp_path / "peft")
    rng = random.Random(seed)
    assert_teacher_forced(engine, model, [random_request(rng, "x", 20) for _ in range(3)])


def assert_teacher_forced(engine: Engine, model: torch.nn.Module, requests: list[Request]) -> None:
    """Each generated token has the largest logit of one forward over prompt and answer, up to float32 rounding."""
    outputs = {output.request_id: output for output in engine.generate(requests)}
    for request in requests:
        answer = list(outputs[request.request_id].token_ids)
        assert isinstance(request.prompt, list) and len(answer) == request.sampling.max_tokens
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*request.prompt, *answer]])).logits[0]
        logits = logits[-len(answer) - 1 : -1]  # HF PEFT gives logits for virtual tokens too
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() <= 1e-4 * logits.abs().max()
