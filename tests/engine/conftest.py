"""A tiny random base with a tokenizer, adapter folders for it, and engines over it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from peftkit.artifact import write_adapter
from peftkit.base import module_shapes
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
)
from peftkit.methods.prefix import kv_width
from peftkit_serve import Engine
from peftkit_serve.plan import StepPlan, StepResult
from peftkit_serve.runner import Launched

CONTEXT = 160


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--duration", type=float, default=3.0, help="seconds that each fuzz of the engine takes")


CONFIG = LlamaConfig(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.4,  # spread enough that an adapter, or one wrong key, changes the tokens
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=256,
    pad_token_id=None,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", model_max_length=CONTEXT)


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with fresh random weights."""
    weights_seed = random.SystemRandom().randrange(2**31)
    print(f"weights of the tiny base: torch.manual_seed({weights_seed})")
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(weights_seed)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def lora_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a random LoRA with a large update and returns its folder."""

    def write(seed: int, r: int = 4, config: PretrainedConfig = CONFIG, **fields: Any) -> Path:
        method = LoraConfig.model_validate({"r": r, "alpha": 2.0 * r} | fields)
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for path, site in method.resolve(module_shapes(config)).items():
            for side, shape in (("A", (site.r, site.in_features)), ("B", (site.out_features, site.r))):
                tensors[f"base_model.model.{path}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.2
            if method.variant == "dora":
                magnitude = torch.rand(site.out_features, generator=generator) * 3.0 + 0.5
                tensors[f"base_model.model.{path}.lora_magnitude_vector"] = magnitude
        return write_adapter(tmp_path / f"lora-{seed}-{r}", method, tensors, {}).path

    return write


@pytest.fixture
def prompt_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random virtual tokens and returns their folder."""

    def write(seed: int, num_virtual: int = 20) -> Path:
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn(num_virtual, CONFIG.hidden_size, generator=generator)
        config = PromptTuningConfig(num_virtual_tokens=num_virtual, init="random")
        return write_adapter(tmp_path / f"prompt-{seed}", config, {"prompt_embeddings": embeddings}, {}).path

    return write


@pytest.fixture
def bottleneck_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random bottleneck adapters with a large effect and returns their folder."""

    def write(seed: int, config: PretrainedConfig = CONFIG, **fields: Any) -> Path:
        method = BottleneckConfig.model_validate({"bottleneck_size": 5} | fields).resolved(config.hidden_size)
        generator = torch.Generator().manual_seed(seed)
        shapes = method.expected_tensors(config.num_hidden_layers, config.hidden_size)
        tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
        return write_adapter(tmp_path / f"{method.variant}-{seed}", method, tensors, {}).path

    return write


VIRTUAL = {
    "prompt": PromptTuningConfig,
    "ptuning": PTuningConfig,
    "prefix": PrefixTuningConfig,
    "ptuning_v2": PTuningV2Config,
}


@pytest.fixture
def virtual_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random virtual tokens of a kind of the prompt family and returns their folder."""

    def write(kind: str, seed: int, num_virtual: int = 20, config: PretrainedConfig = CONFIG) -> Path:
        width = config.hidden_size if kind in ("prompt", "ptuning") else config.num_hidden_layers * 2 * kv_width(config)
        table = torch.randn(num_virtual, width, generator=torch.Generator().manual_seed(seed))
        method = VIRTUAL[kind](num_virtual_tokens=num_virtual)
        record = {"base": {"layers": config.num_hidden_layers, "kv_heads": config.num_key_value_heads}}
        return write_adapter(tmp_path / f"{kind}-{seed}", method, {"prompt_embeddings": table}, record).path

    return write


@pytest.fixture
def every_kind(
    lora_folder: Callable[..., Path], bottleneck_folder: Callable[..., Path], virtual_folder: Callable[..., Path]
) -> Callable[..., dict[str, Path]]:
    """Writes an adapter of every kind that is served, named by its kind."""

    def write(seed: int, config: PretrainedConfig = CONFIG) -> dict[str, Path]:
        folders = {
            "lora": lora_folder(seed, config=config),
            "lora-some": lora_folder(seed + 1, 9, config=config, targets=["q_proj", "down_proj"], variant="rslora"),
            "dora": lora_folder(seed + 2, 3, config=config, targets=["k_proj", "o_proj", "up_proj"], variant="dora"),
            "houlsby": bottleneck_folder(seed, config),
            "pfeiffer": bottleneck_folder(seed, config, variant="pfeiffer", ln_before=True, non_linearity="gelu"),
            "parallel": bottleneck_folder(seed, config, variant="parallel", layers_to_transform=[1], scaling=1.5),
        }
        for kind, num_virtual in (("prompt", 20), ("ptuning", 32), ("prefix", 7), ("ptuning_v2", 21)):
            folders[kind] = virtual_folder(kind, seed, num_virtual, config)
        return folders

    return write


@pytest.fixture
def make_engine(base_folder: Path) -> Iterator[Callable[..., Engine]]:
    """Makes a small deterministic engine on the CPU; at the end every one must be whole."""
    engines: list[Engine] = []

    def make(base: Path = base_folder, **settings: Any) -> Engine:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "max_tokens_per_step": 32,
            "max_requests": 8,
            "max_adapters": 2,
            "num_pages": 64,
            "deterministic": True,
        }
        engines.append(Engine(base, **(defaults | settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()


@pytest.fixture
def record_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], dict[tuple[str, int], torch.Tensor]]:
    """Watches an engine: the logits that each (request, number of its token) is drawn from come into the dictionary."""

    def watch(engine: Engine) -> dict[tuple[str, int], torch.Tensor]:
        seen: dict[tuple[str, int], torch.Tensor] = {}
        launch, logits = engine._runner.launch, engine._runner._decoder.logits
        rows: list[torch.Tensor] = []

        def keep(*args: Any) -> torch.Tensor:
            rows[:] = [logits(*args)]
            return rows[0]

        def watched(plan: StepPlan) -> Launched | StepResult:
            result = launch(plan)
            drawn = [chunk for chunk in plan.chunks if chunk.sample is not None]
            for row, chunk in enumerate(drawn):
                assert chunk.sample is not None
                seen[chunk.request_id, chunk.sample.step] = rows[0][row].clone()
            return result

        monkeypatch.setattr(engine._runner._decoder, "logits", keep)
        monkeypatch.setattr(engine._runner, "launch", watched)
        return seen

    return watch
