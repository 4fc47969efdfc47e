"""Rows of the bare base have the bits of a step without adapters, whatever their neighbours have."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.artifact import save_adapter
from peftkit.methods import BottleneckConfig, LoraConfig, MethodConfig, attach, attached, detach
from peftkit_serve import Engine, Request, SamplingParams
from peftkit_serve.plan import Chunk, Sample

CONFIGS: list[MethodConfig] = [
    LoraConfig(r=8, alpha=8, targets=["q_proj", "v_proj"]),
    LoraConfig(r=16, alpha=16),
    BottleneckConfig(bottleneck_size=16),
]
GREEDY = Sample(SamplingParams(temperature=0.0), 0, 0)
ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def wide_base(tmp_path: Path, tiny_base: Path, seed: int) -> Path:
    """The tiny base with products wide enough for a GPU's own kernels."""
    folder = tmp_path / "base"
    config = LlamaConfig.from_pretrained(
        tiny_base, hidden_size=1024, intermediate_size=1536, num_attention_heads=16, num_key_value_heads=4, head_dim=64
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for path in tiny_base.iterdir():
        if not (folder / path.name).exists() and path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("device", ON)
def test_a_bare_row_has_the_same_bits_beside_any_neighbours(
    wide_base: Path, own_cache: None, tmp_path: Path, seed: int, device: str
) -> None:
    rng = random.Random(seed)
    model = LlamaForCausalLM.from_pretrained(wide_base, dtype=torch.bfloat16)
    engine = Engine(wide_base, device=device, num_pages=80, max_requests=64, graphs=False)
    for n, config in enumerate(CONFIGS):
        attach(model, config)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.2)
        save_adapter(model, tmp_path / f"adapter-{n}")
        detach(model)
        engine.adapters.add(f"adapter-{n}", tmp_path / f"adapter-{n}")
        list(engine.generate([Request([5], f"adapter-{n}", SamplingParams(max_tokens=1))]))  # resident from now on
    runner = engine._runner
    slots = sorted(runner.memory._resident)
    assert len(slots) == len(CONFIGS)
    for count in (1, 5, 16, 20, 33, 40, 64):
        rows = [(rng.randrange(3, 200), rng.choice([-1, -1, *slots])) for _ in range(count)]
        rows[0] = (rows[0][0], -1)
        with torch.inference_mode():
            mixed, alone = (
                runner._logits(
                    runner._batch(
                        [Chunk("", (token,), 0, (n,), slot, 0, GREEDY) for n, (token, slot) in enumerate(step)]
                    )
                )
                for step in (rows, [(token, -1) for token, _ in rows])
            )
        bare = [n for n, (_, slot) in enumerate(rows) if slot < 0]
        assert torch.equal(mixed[bare], alone[bare]), count
