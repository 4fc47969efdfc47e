"""Bits: in deterministic mode a mixed batch gives what solo runs give; by default adapters leave bare rows alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from peftkit.base import BaseInfo, module_shapes
from peftkit.methods import BottleneckConfig, LoraConfig
from peftkit_serve.adapters.packing import PackedAdapter, pack_bottleneck, pack_lora
from peftkit_serve.plan import Chunk, Sample
from peftkit_serve.request import SamplingParams
from peftkit_serve.runner import Runner

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 70,  # no multiple of a vector's lanes
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3-window": Qwen3Config(**SIZES, head_dim=10, use_sliding_window=True, sliding_window=11, max_window_layers=1),
}


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    return CONFIGS[request.param]


@pytest.fixture
def folder(seed: int, config: PretrainedConfig, tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def random_lora(config: PretrainedConfig, runner: Runner, **fields: Any) -> PackedAdapter:
    sites = LoraConfig(**fields).resolve(module_shapes(config))
    tensors = {}
    for path, site in sites.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(site.r, site.in_features) * 0.2
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(site.out_features, site.r) * 0.2
    return pack_lora(tensors, sites, runner.spec, base_linear=runner.base_linear)


def random_dora(config: PretrainedConfig, runner: Runner) -> PackedAdapter:
    sites = LoraConfig(r=3, targets=["v_proj", "o_proj", "gate_proj"]).resolve(module_shapes(config))
    tensors = {}
    for path, site in sites.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(site.r, site.in_features) * 0.2
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(site.out_features, site.r) * 0.2
        tensors[f"base_model.model.{path}.lora_magnitude_vector"] = torch.rand(site.out_features) * 4
    return pack_lora(tensors, sites, runner.spec, base_linear=runner.base_linear)


def random_bottleneck(config: PretrainedConfig, runner: Runner, **fields: Any) -> PackedAdapter:
    method = BottleneckConfig(bottleneck_size=7, ln_before=True, **fields).resolved(config.hidden_size)
    shapes = method.expected_tensors(config.num_hidden_layers, config.hidden_size)
    return pack_bottleneck({name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}, method, runner.spec)


@torch.inference_mode()
def logits(runner: Runner, chunks: list[Chunk]) -> Tensor:
    batch = runner._batch(chunks)
    return runner._decoder.logits(runner._decoder.forward(batch, runner._kv), batch)


def chunk(tokens: list[int], start: int, end: int, table: tuple[int, ...], slot: int) -> Chunk:
    return Chunk("", tuple(tokens[start:end]), start, table, slot, 0, Sample(SamplingParams(), 0, 0))


def solo(runner: Runner, tokens: list[int], slot: int) -> list[Tensor]:
    """Logits after each token of a request that runs alone, its prompt in one piece up to a random place."""
    table = tuple(torch.randperm(runner.num_pages)[:8].tolist())
    rows: list[Tensor] = []
    for end in range(1, len(tokens) + 1):  # from the beginning every time: the pages can't hide a difference
        rows.append(logits(runner, [chunk(tokens, 0, end, table, slot)])[0])
    return rows


def test_every_row_of_mixed_steps_has_the_bits_of_its_solo_run(
    seed: int, threads: int, config: PretrainedConfig, folder: Path
) -> None:
    rng = random.Random(seed)
    mixed = Runner(BaseInfo("tiny", folder), device="cpu", num_pages=64, num_slots=6, deterministic=True)
    adapters = [
        random_lora(config, mixed, r=4),
        random_lora(config, mixed, r=1, targets=["q_proj", "up_proj"]),
        random_dora(config, mixed),
        random_bottleneck(config, mixed),
        random_bottleneck(config, mixed, variant="pfeiffer", non_linearity="gelu"),
    ]
    slots = rng.sample(range(6), 5)
    for slot, adapter in zip(slots, adapters, strict=True):
        mixed.memory.load(slot, adapter)
    texts = [[rng.randrange(131) for _ in range(rng.randint(1, 45))] for _ in range(8)]
    who = rng.sample([*range(6), rng.randrange(6), rng.randrange(6)], 8)  # 5 has no adapter
    wanted: list[list[Tensor]] = []
    for text, number in zip(texts, who, strict=True):
        alone = Runner(BaseInfo("tiny", folder), device="cpu", num_pages=9, num_slots=1, deterministic=True)
        if number < 5:
            alone.memory.load(0, adapters[number])
        wanted.append(solo(alone, text, 0 if number < 5 else -1))
    for _ in range(3):
        pages = torch.randperm(64).tolist()
        tables = [tuple(pages.pop() for _ in range(3)) for _ in texts]
        done = [0] * len(texts)
        while waiting := [n for n, text in enumerate(texts) if done[n] < len(text)]:
            step = rng.sample(waiting, rng.randint(1, len(waiting)))
            ends = {n: rng.choice([done[n] + 1, rng.randint(done[n] + 1, len(texts[n]))]) for n in step}
            rows = logits(
                mixed,
                [chunk(texts[n], done[n], ends[n], tables[n], [*slots, -1][who[n]]) for n in step],
            )
            for n, row in zip(step, rows, strict=True):
                done[n] = ends[n]
                assert torch.equal(row, wanted[n][ends[n] - 1]), f"request {n} after {ends[n]} tokens"


@pytest.mark.parametrize("deterministic", [False, True])
def test_bare_rows_have_the_same_bits_whether_their_neighbours_are_adapted_or_not(
    seed: int, threads: int, config: PretrainedConfig, folder: Path, deterministic: bool
) -> None:
    rng = random.Random(seed)
    runner = Runner(BaseInfo("tiny", folder), device="cpu", num_pages=64, num_slots=3, deterministic=deterministic)
    runner.memory.load(0, random_dora(config, runner))
    runner.memory.load(1, random_bottleneck(config, runner, variant="parallel"))
    runner.memory.load(2, random_lora(config, runner, r=3))
    texts = [[rng.randrange(131) for _ in range(rng.choice([1, 1, 20]))] for _ in range(9)]
    tables = [(3 * n, 3 * n + 1, 3 * n + 2) for n in range(9)]
    slots = [rng.choice([-1, 0, 1, 2]) for _ in texts]
    with_adapters = logits(runner, [chunk(t, 0, len(t), tables[n], slots[n]) for n, t in enumerate(texts)])
    without = logits(runner, [chunk(t, 0, len(t), tables[n], -1) for n, t in enumerate(texts)])
    for n, slot in enumerate(slots):
        assert torch.equal(with_adapters[n], without[n]) == (slot == -1)
