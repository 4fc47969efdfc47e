"""Generation against references: transformers with peftkit's methods, and HF PEFT."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit_serve import Engine, Request, SamplingParams

MakeEngine = Callable[..., Engine]
Folder = Callable[..., Path]
Record = Callable[[Engine], dict[tuple[str, int], torch.Tensor]]
AssertServed = Callable[..., None]


def random_request(rng: random.Random, adapter: str | None, max_tokens: int) -> Request:
    """A greedy request of 1 to 40 random tokens."""
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    return Request(prompt, adapter, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@pytest.mark.parametrize(
    ("compute", "deterministic"),
    [
        ("cpu-float32", False),
        ("cpu-float32", True),
        ("cpu-bfloat16", False),
        pytest.param("cuda-bfloat16", False, marks=pytest.mark.gpu),
        pytest.param("cuda-bfloat16", True, marks=pytest.mark.gpu),
    ],
    indirect=["compute"],
)
def test_generation_in_chunks_has_the_logits_of_one_forward_in_transformers(
    make_engine: MakeEngine,
    base_folder: Path,
    lora_folder: Folder,
    prompt_folder: Folder,
    record_logits: Record,
    assert_served: AssertServed,
    method_model: Callable[[Path, Path | None, torch.dtype], torch.nn.Module],
    seed: int,
    compute: str,
    deterministic: bool,
) -> None:
    engine = make_engine(device=compute, max_tokens_per_step=8, deterministic=deterministic)
    folders = {"lora": lora_folder(seed), "prompt": prompt_folder(seed), "prompt-whole-pages": prompt_folder(seed, 32)}
    for kind, folder in folders.items():
        engine.adapters.add(kind, folder)
    rng, logits = random.Random(seed), record_logits(engine)
    for kind in (None, *folders):
        requests = [random_request(rng, kind, 25) for _ in range(4)]
        outputs = {output.request_id: output for output in engine.generate(requests)}
        for request in requests:
            assert_served(
                request,
                outputs[request.request_id],
                logits,
                partial(method_model, base_folder, folders.get(kind or "")),
            )


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
    "head": lambda: peft.LoraConfig(r=3, target_modules=["lm_head", "q_proj"]),
    "head-dora": lambda: peft.LoraConfig(r=3, use_dora=True, target_modules=["lm_head", "gate_proj"]),
    "embedding": lambda: peft.LoraConfig(r=5, target_modules=["embed_tokens", "lm_head"], rank_pattern={"lm_head": 6}),
    "saved-head": lambda: peft.LoraConfig(r=5, target_modules=["o_proj"], modules_to_save=["lm_head"]),
    "saved-embedding": lambda: peft.LoraConfig(r=5, target_modules=["v_proj"], modules_to_save=["embed_tokens"]),
    "tokens": lambda: peft.LoraConfig(r=5, target_modules=["k_proj"], trainable_token_indices=[*range(0, 256, 3)]),
    "tokens-apart": lambda: peft.LoraConfig(
        r=5,
        target_modules=["down_proj"],
        trainable_token_indices={"embed_tokens": [*range(1, 256, 2)], "lm_head": [5, 70]},
    ),
}
ENDS = ("embedding", "saved-head", "saved-embedding", "tokens", "tokens-apart")


def test_adapters_that_hf_peft_wrote_have_the_logits_of_hf_peft_in_one_batch(
    make_engine: MakeEngine,
    base_folder: Path,
    record_logits: Record,
    assert_served: AssertServed,
    tmp_path: Path,
    seed: int,
    compute: str,
) -> None:
    engine = make_engine(device=compute, max_adapters=len(PEFT_CONFIGS), max_requests=len(PEFT_CONFIGS) + 1)
    bare = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    for kind, config in PEFT_CONFIGS.items():
        model = peft.get_peft_model(copy.deepcopy(bare), config())
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn(parameter.shape)
        model.save_pretrained(str(tmp_path / kind))
        engine.adapters.add(kind, tmp_path / kind)

    def reference(kind: str | None, dtype: torch.dtype) -> torch.nn.Module:
        base: Any = copy.deepcopy(bare)
        return peft.PeftModel.from_pretrained(base.to(dtype), f"{tmp_path / str(kind)}", autocast_adapter_dtype=False)

    rng, logits = random.Random(seed), record_logits(engine)
    for kinds in ([kind for kind in PEFT_CONFIGS if kind not in ENDS], [*PEFT_CONFIGS]):
        requests = [random_request(rng, kind, 20) for kind in kinds]
        outputs = {output.request_id: output for output in engine.generate(requests)}
        for request in requests:
            assert_served(request, outputs[request.request_id], logits, partial(reference, request.adapter), atol=5e-4)
