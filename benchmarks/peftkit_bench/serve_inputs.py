"""What `peftkit bench serve` works on: random bases and adapters, made where they are needed, and requests."""

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from peftkit.base import BaseInfo, Fingerprint
from peftkit.methods import LoraConfig
from peftkit.methods.lora import LoraSite
from peftkit_serve.adapters.loader import LoadedAdapter
from peftkit_serve.adapters.packing import PackedAdapter, pack_lora
from peftkit_serve.models.spec import PROJECTIONS, ModelSpec
from peftkit_serve.models.weights import TensorSource


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256),
    "toy": Shape(64, 128, 2, 4, 2, 16, 512),
}


def write_config(folder: Path, shape: Shape, max_positions: int) -> Path:
    """A base's sizes alone."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, **vars(shape),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_base(folder: Path, shape: Shape, max_positions: int) -> Path:
    """A base without weights: config and a tokenizer of ASCII characters with a token for every id."""
    write_config(folder, shape, max_positions)
    # no bytes that are part of a character: each token is a piece of a stream
    alphabet = sorted(filter(str.isascii, pre_tokenizers.ByteLevel.alphabet()))
    words = [*alphabet, *(f"t{number}" for number in range(len(alphabet), shape.vocab_size))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_positions).save_pretrained(folder)
    return folder


class RandomBase(BaseInfo):
    """A base whose weights lie in no file."""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint("LlamaForCausalLM", config="", weights="", tokenizer="")


class _RandomTensors:
    """Norms of ones, normal weights of standard deviation 0.02."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.fill_(1) if len(shape) == 1 else tensor.normal_(0.0, 0.02, generator=self._generator)

    def __contains__(self, name: str) -> bool:
        return True

    def check_all_taken(self) -> None: ...


@contextmanager
def random_tensors(dtype: torch.dtype, device: torch.device) -> Iterator[TensorSource]:
    """A base's tensors, made on the device."""
    yield _RandomTensors(dtype, device)


def random_adapters(spec: ModelSpec, count: int, rank: int, dtype: torch.dtype, device: str) -> Iterator[LoadedAdapter]:
    """LoRAs on all seven projections, all different, straight into host memory, pinned where there is a GPU."""
    template = _template(spec, rank, dtype)
    lengths = [layer.weights.numel() for layer in template.layers]
    config = LoraConfig(r=rank, alpha=2.0 * rank)
    for number in range(count):
        generator = torch.Generator(device).manual_seed(number)
        drawn = torch.empty(sum(lengths), dtype=dtype, device=device).normal_(0.0, 0.01, generator=generator)
        host = torch.empty(drawn.shape, dtype=dtype, pin_memory=device == "cuda").copy_(drawn)
        parts = host.split(lengths)
        layers = tuple(replace(layer, weights=part) for layer, part in zip(template.layers, parts, strict=True))
        yield LoadedAdapter(f"bench-{number}", (config,), {}, weights=PackedAdapter(layers))


def _template(spec: ModelSpec, rank: int, dtype: torch.dtype) -> PackedAdapter:
    tensors: dict[str, Tensor] = {}
    sites: dict[str, LoraSite] = {}
    for layer in range(spec.num_layers):
        for name, (out, inside) in zip(PROJECTIONS, spec.projection_shapes, strict=True):
            path = f"model.layers.{layer}.{name}"
            sites[path] = LoraSite(rank, 2.0, inside, out)
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.zeros(1).expand(rank, inside)
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.zeros(1).expand(out, rank)

    def no_base(path: str) -> tuple[Tensor, Tensor | None]:
        raise AssertionError(path)

    return pack_lora(tensors, sites, spec, base_linear=no_base, dtype=dtype)


def workload(requests: int, adapters: int, dist: str, vocab: int, seed: int = 0) -> list[tuple[list[int], int | None]]:
    """(prompt, adapter) of S1, the very ones of the peer's program: lognormal lengths, adapters uniform or Zipf(1)."""
    rng, sigma = random.Random(seed), 0.7
    mu = math.log(256) - sigma * sigma / 2
    lengths = [min(1024, max(16, round(rng.lognormvariate(mu, sigma)))) for _ in range(requests)]
    prompts = [[rng.randrange(10, vocab - 10) for _ in range(length)] for length in lengths]
    if not adapters:
        return [(prompt, None) for prompt in prompts]
    weights = [1.0] * adapters if dist == "uniform" else [1 / (number + 1) for number in range(adapters)]
    return list(zip(prompts, rng.choices(range(adapters), weights, k=requests), strict=True))
