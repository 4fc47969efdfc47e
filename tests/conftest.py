"""Fixtures that every room of the tests shares: a printed seed, and a tiny random base with a byte tokenizer."""

import os
import random
from collections import defaultdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed so that a failure can be repeated with PEFTKIT_TEST_SEED."""
    value = int(os.environ.get("PEFTKIT_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"PEFTKIT_TEST_SEED={value}")
    torch.manual_seed(value)
    return value


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ChatML, and as in many bases pad = eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, saved with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-base")
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what peftkit converts and remembers in any test out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEFTKIT_HOME", str(tmp_path_factory.getbasetemp() / "peftkit-home"))
        yield


@pytest.fixture
def embedded_cache(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for the embedded base's conversion, half a gigabyte, that stays in the checkout's .pytest_cache."""
    assert pytestconfig.cache is not None
    monkeypatch.setenv("PEFTKIT_HOME", str(pytestconfig.cache.mkdir("peftkit")))


@pytest.fixture
def compute_capability_90(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton compile for compute capability 9.0 without a GPU; a launch would ask the driver for more."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Device:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(driver, "_active", Device())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What Triton's kernels take, a line each, after the tests that compile them."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    taken: defaultdict[str, defaultdict[int, list[dict[str, int]]]] = defaultdict(lambda: defaultdict(list))
    for properties in (dict(report.user_properties) for report in reports):
        if "registers" in properties:
            taken[properties["kernel"]][properties["capability"]].append(properties)
    if not taken:
        return
    capabilities = sorted({capability for by_capability in taken.values() for capability in by_capability})
    columns = [f"{capability // 10}.{capability % 10}" for capability in capabilities]
    terminalreporter.section("kernels, most of all variants: registers, spills, KiB of shared memory; variants")
    terminalreporter.line(" " * 32 + "".join(f"{column:>20}" for column in columns))
    for kernel, by_capability in sorted(taken.items()):
        cells = [_kernel_cell(by_capability[capability]) for capability in capabilities]
        terminalreporter.line(f"{kernel:<32}" + "".join(f"{cell:>20}" for cell in cells))


def _kernel_cell(variants: list[dict[str, int]]) -> str:
    if not variants:
        return "–"
    registers, spills = (max(one[name] for one in variants) for name in ("registers", "spills"))
    shared = max(one["shared_bytes"] + one["own_shared_bytes"] for one in variants)
    return f"{registers}, {spills}, {shared / 1024:.0f}; {len(variants)}"
