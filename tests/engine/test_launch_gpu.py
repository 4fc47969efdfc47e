"""On a GPU no step waits for the device where it is launched, whatever its rows are drawn by and its adapters have."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from peftkit.artifact import save_adapter
from peftkit.methods import LoraConfig, MethodConfig, attach, attached, detach
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.plan import StepPlan, StepResult
from peftkit_serve.runner import Launched

pytestmark = pytest.mark.gpu

CONFIGS: dict[str, MethodConfig] = {
    "lora": LoraConfig(r=4, alpha=8),
    "embedding": LoraConfig(r=4, alpha=8, targets=["q_proj", "embed_tokens"]),
    "rows": LoraConfig(r=4, alpha=8, trainable_token_indices=[5, 9, 200]),
}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": ((7, 2.0), (9, -1.0))},
]


@pytest.mark.parametrize("graphs", [True, False])
def test_no_step_waits_for_the_device_where_it_is_launched(
    tiny_base: Path, own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, graphs: bool
) -> None:
    rng = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    engine = Engine(tiny_base, device="cuda", num_pages=128, max_requests=8, graphs=graphs)
    for name, config in CONFIGS.items():
        attach(model, config)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.1)
        save_adapter(model, tmp_path / name)
        detach(model)
        engine.adapters.add(name, tmp_path / name)

    def requests(count: int) -> list[Request]:
        drawn: list[Request] = []
        for n in range(count):
            params = SamplingParams(max_tokens=rng.randint(5, 20), ignore_eos=True, seed=n, **rng.choice(WAYS))
            prompt = [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))]
            drawn.append(Request(prompt, rng.choice([None, *CONFIGS]), params))
        return drawn

    list(engine.generate(requests(12)))  # adapters' copies and kernels' loading are not steps'
    launch = engine._runner.launch

    def watched(plan: StepPlan) -> Launched | StepResult:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert isinstance(launched, Launched)
        return launched

    monkeypatch.setattr(engine._runner, "launch", watched)
    outputs = list(engine.generate(requests(30)))
    assert {output.finish_reason for output in outputs} == {"length"}, "a step that raises ends its requests"
