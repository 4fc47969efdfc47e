"""The engine on a GPU: what it generates is what transformers finds most likely, for every row of a mixed batch."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.artifact import load_adapter, save_adapter
from peftkit.methods import LoraConfig, MethodConfig, PromptTuningConfig, attach, attached, detach
from peftkit_serve import Engine, Request, SamplingParams

pytestmark = pytest.mark.gpu

CONFIGS: dict[str, MethodConfig] = {
    "lora": LoraConfig(r=4, alpha=8),
    "prompt": PromptTuningConfig(num_virtual_tokens=21),
}


def test_greedy_tokens_are_transformers_most_likely(
    tiny_base: Path, own_cache: None, tmp_path: Path, seed: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32).cuda()
    engine = Engine(tiny_base, device="cuda", num_pages=64)
    for name, config in CONFIGS.items():
        attach(model, config)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.3)
        save_adapter(model, tmp_path / name)
        detach(model)
        engine.adapters.add(name, tmp_path / name)
    prompts = {
        name: torch.randint(3, 200, (length,)).tolist() for name, length in (("lora", 9), ("prompt", 30), ("", 17))
    }
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    requests = [
        Request(prompt=ids, adapter=name or None, sampling=greedy, request_id=name) for name, ids in prompts.items()
    ]
    for output in engine.generate(requests):
        name, prompt = output.request_id, prompts[output.request_id]
        if name:
            load_adapter(model, tmp_path / name)
        ids = torch.tensor([prompt + list(output.token_ids)], device="cuda")
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # the engine computes in bfloat16: a token may lose to one that is as likely within its rounding
        assert (logits.max(-1).values - chosen <= 0.05 * logits.std()).all(), name
        detach(model)
    engine.check_integrity()
