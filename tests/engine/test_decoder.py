"""The paged decoder against transformers and HF PEFT: the same logits however requests are cut into steps."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from peftkit.base import BaseInfo
from peftkit.methods.lora import LoraSite
from peftkit_serve.adapters.packing import pack_lora
from peftkit_serve.plan import Chunk, Sample, StepPlan
from peftkit_serve.request import SamplingParams
from peftkit_serve.runner import Runner

CONTEXT = 96
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,  # large enough that attention and every bias move the logits
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-biases-tied": lambda: LlamaConfig(
        **SIZES | {"tie_word_embeddings": True}, attention_bias=True, mlp_bias=True
    ),
    "llama-mha-gelu": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}, hidden_act="gelu_pytorch_tanh"),
    "llama3-rope": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=7, head_dim=12),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-yarn": lambda: Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen2-window-layers": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3-window-types": lambda: Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-linear-rope": lambda: Qwen3Config(
        **SIZES, head_dim=8, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    ),
}


def make_model(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """A random model, saved; its norms and biases too are random."""
    model: PreTrainedModel = Auto.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


class Stepper:
    """Drives a runner with hand-made chunks; every request has pages of its own, in random order."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.runner = Runner(BaseInfo("tiny", folder), device="cpu", num_pages=64, num_slots=4, **settings)
        self._free_pages = torch.randperm(64).tolist()
        self._tables: dict[str, tuple[int, ...]] = {}

    def table(self, name: str) -> tuple[int, ...]:
        if name not in self._tables:
            self._tables[name] = tuple(self._free_pages.pop() for _ in range(CONTEXT // 16))
        return self._tables[name]

    def chunk(self, name: str, tokens: list[int], start: int, *, slot: int = -1, num_virtual: int = 0) -> Chunk:
        sample = Sample(SamplingParams(), 0, 0)
        return Chunk(name, tuple(tokens), start, self.table(name), slot, num_virtual, sample)

    @torch.inference_mode()
    def logits(self, chunks: list[Chunk]) -> Tensor:
        """Logits after each chunk's last token."""
        batch = self.runner._batch(chunks)
        return self.runner._decoder.logits(self.runner._decoder.forward(batch, self.runner._kv), batch)


def random_steps(rng: random.Random, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Cuts requests into steps of random chunks, (request, start, end), until all are computed."""
    done, steps = [0] * len(lengths), []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        waiting = [n for n, length in enumerate(lengths) if done[n] < length]
        step = []
        for n in rng.sample(waiting, rng.randint(1, len(waiting))):
            end = rng.choice([done[n] + 1, rng.randint(done[n] + 1, lengths[n])])
            step.append((n, done[n], end))
            done[n] = end
        steps.append(step)
    return steps


def random_prompts(rng: random.Random, count: int, high: int = 70) -> list[list[int]]:
    return [[rng.randrange(67) for _ in range(rng.randint(1, high))] for _ in range(count)]


@torch.inference_mode()
def hf_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers_however_requests_are_cut(
    seed: int, tmp_path: Path, family: str, deterministic: bool
) -> None:
    rng = random.Random(seed)
    model = make_model(CONFIGS[family](), tmp_path)
    stepper = Stepper(tmp_path, deterministic=deterministic)
    prompts = random_prompts(rng, 5)
    exact = [hf_logits(model, prompt) for prompt in prompts]
    for step in random_steps(rng, [len(prompt) for prompt in prompts]):
        logits = stepper.logits([stepper.chunk(str(n), prompts[n][start:end], start) for n, start, end in step])
        for (n, _, end), row in zip(step, logits, strict=True):
            torch.testing.assert_close(row, exact[n][end - 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_of_256k_has_the_same_logits_and_is_drawn_from_whole(
    seed: int, tmp_path: Path, tied: bool
) -> None:
    rng, vocab = random.Random(seed), 262_144
    sizes = SIZES | {"vocab_size": vocab, "num_hidden_layers": 1, "tie_word_embeddings": tied}
    model = make_model(LlamaConfig(**sizes), tmp_path)
    stepper = Stepper(tmp_path)
    prompts = [[rng.randrange(vocab) for _ in range(size)] for size in (3, 9)]
    chunks = [stepper.chunk(str(n), prompt, 0) for n, prompt in enumerate(prompts)]
    exact = torch.stack([hf_logits(model, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(stepper.logits(chunks), exact, atol=1e-4, rtol=0)
    greedy = [one._replace(sample=Sample(SamplingParams(temperature=0.0), 0, 0)) for one in chunks]
    assert list(stepper.runner.run(StepPlan(tuple(greedy))).tokens.values()) == exact.argmax(1).tolist()


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_whole_prompts_then_single_tokens(seed: int, tmp_path: Path, family: str) -> None:
    rng = random.Random(seed)
    model = make_model(CONFIGS[family](), tmp_path)
    stepper = Stepper(tmp_path)
    texts = [prompt + [rng.randrange(67) for _ in range(20)] for prompt in random_prompts(rng, 4, 40)]
    exact = [hf_logits(model, text) for text in texts]
    logits = stepper.logits([stepper.chunk(str(n), text[:-20], 0) for n, text in enumerate(texts)])
    for step in range(20):
        wanted = torch.stack([exact[n][len(text) - 21 + step] for n, text in enumerate(texts)])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        ends = [len(text) - 20 + step for text in texts]
        logits = stepper.logits([stepper.chunk(str(n), [texts[n][end]], end) for n, end in enumerate(ends)])


def peft_loras(model: PreTrainedModel, seed: int) -> tuple[peft.PeftModel, list[str]]:
    """Four adapters of different ranks, scalings and targets, all with random A and B, in one PEFT model."""
    settings: dict[str, dict[str, Any]] = {
        "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "few": {"r": 2, "lora_alpha": 3, "target_modules": ["k_proj", "down_proj"], "use_rslora": True},
        "patterned": {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"v_proj": 9, "layers.1.self_attn.q_proj": 1},
            "alpha_pattern": {"up_proj": 24},
            "layers_to_transform": [1, 2],
        },
        "dora": {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
            "use_dora": True,
        },
    }
    first, *others = settings
    tuned = peft.get_peft_model(model, peft.LoraConfig(**settings[first]), adapter_name=first)
    for name in others:
        tuned.add_adapter(name, peft.LoraConfig(**settings[name]))
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in tuned.named_parameters():
        if "lora_magnitude_vector" in key:
            parameter.data = parameter.data * (0.5 + torch.rand(parameter.shape, generator=generator))
        elif "lora_" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15
    assert isinstance(tuned, peft.PeftModel)
    return tuned, [first, *others]


def load_from_peft(stepper: Stepper, tuned: peft.PeftModel, name: str, slot: int) -> None:
    prefix = "base_model.model."
    sites = {
        path.removeprefix(prefix): LoraSite(
            module.r[name], module.scaling[name], module.base_layer.out_features, module.base_layer.in_features
        )
        for path, module in tuned.named_modules()
        if isinstance(module, LoraLayer) and name in module.r
    }
    tensors = {key: value.clone() for key, value in peft.get_peft_model_state_dict(tuned, adapter_name=name).items()}
    runner = stepper.runner
    runner.memory.load(slot, pack_lora(tensors, sites, runner.spec, base_linear=runner.base_linear))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama-biases-tied", "mistral-window", "qwen2", "qwen3"])
def test_loras_and_bare_rows_in_one_step_have_the_logits_of_hf_peft(
    seed: int, tmp_path: Path, family: str, deterministic: bool
) -> None:
    rng = random.Random(seed)
    model = make_model(CONFIGS[family](), tmp_path)
    stepper = Stepper(tmp_path, deterministic=deterministic)
    tuned, names = peft_loras(model, seed)
    slots = [*rng.sample(range(4), 4), -1]
    for name, slot in zip(names, slots, strict=False):
        load_from_peft(stepper, tuned, name, slot)
    prompts, who = random_prompts(rng, 8, 40), rng.sample([*range(5), *range(2, 5)], 8)
    exact = []
    for prompt, number in zip(prompts, who, strict=True):
        if number == 4:
            with tuned.disable_adapter():
                exact.append(hf_logits(tuned, prompt))
        else:
            tuned.set_adapter(names[number])
            exact.append(hf_logits(tuned, prompt))
    for step in random_steps(rng, [len(prompt) for prompt in prompts]):
        chunks = [stepper.chunk(str(n), prompts[n][start:end], start, slot=slots[who[n]]) for n, start, end in step]
        for (n, _, end), row in zip(step, stepper.logits(chunks), strict=True):
            torch.testing.assert_close(row, exact[n][end - 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_virtual", [1, 16, 21])
@pytest.mark.parametrize("family", ["llama", "qwen2-window-layers"])
def test_virtual_tokens_stand_before_the_text_and_stay_in_sight(
    seed: int, tmp_path: Path, family: str, num_virtual: int
) -> None:
    rng = random.Random(seed)
    config = CONFIGS[family]()
    config._attn_implementation = "eager"
    model = make_model(config, tmp_path)
    stepper = Stepper(tmp_path)
    embeddings, prompt = torch.randn(num_virtual, 32), random_prompts(rng, 1)[0]
    stepper.runner.compute_prefix(embeddings, stepper.table("text"))
    total = num_virtual + len(prompt)
    inputs = torch.cat((embeddings, model.get_input_embeddings()(torch.tensor(prompt))))
    query, key = torch.arange(total)[:, None], torch.arange(total)
    masks = {}
    for kind, window in (("full_attention", total), ("sliding_attention", 5)):
        seen = (key <= query) & ((key > query - window) | (key < num_virtual))
        masks[kind] = torch.zeros(total, total).masked_fill(~seen, float("-inf"))[None, None]
    with torch.inference_mode():
        mask = masks if family == "qwen2-window-layers" else masks["full_attention"]
        exact = model(inputs_embeds=inputs[None], attention_mask=mask).logits[0, num_virtual:]
    for ((_, start, end),) in random_steps(rng, [len(prompt)]):
        chunk = stepper.chunk("text", prompt[start:end], num_virtual + start, num_virtual=num_virtual)
        torch.testing.assert_close(stepper.logits([chunk])[0], exact[end - 1], atol=1e-4, rtol=0)
