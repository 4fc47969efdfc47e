"""What an engine compiles at its start is all that its steps launch: seen on a CPU, where none is compiled or run."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

import triton
from triton.runtime.jit import JITFunction

import peftkit_kernels.triton as kernels
from peftkit_kernels import dispatch
from peftkit_kernels.triton import attention, bottleneck, dependent, linear, lora, segmented
from peftkit_kernels.triton.together import LeftOut
from peftkit_serve import Engine, Request, SamplingParams, runner


class Recorder(triton.AsyncCompileMode):
    """Notes what would be compiled."""

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: list[str] = []

    def submit(
        self, key: Any, compile_fn: object, finalize_fn: Callable[[Any], Any], cleanup_fn: object = None
    ) -> LeftOut:
        self.seen.append(key)
        left_out = LeftOut()
        finalize_fn(left_out)
        return left_out


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, compute_capability_90: None) -> Iterator[Recorder]:
    """Operations on the CPU launch their Triton kernels as on an H200; what these should have written is zeros."""
    monkeypatch.setattr(dispatch, "_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(dispatch, "_triton", cache(dispatch._triton.__wrapped__))
    for module in (segmented, lora, bottleneck, attention, linear):
        monkeypatch.setattr(module, "capability_of", lambda device, interpreted: 90)
    monkeypatch.setattr(dependent, "has_dependents", lambda device: True)
    monkeypatch.setattr(linear, "_NARROW", 16)  # less than the base's sizes, no less than its adapters' ranks
    monkeypatch.setattr(attention, "multiprocessors_of", lambda device: 132)
    monkeypatch.setattr(runner, "compiled_together", lambda device: nullcontext())
    monkeypatch.setattr(runner, "auto_dtype", lambda *_: torch.bfloat16)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, zeroed(getattr(owner, name)))
    forget_kernels()
    with Recorder() as recorder:
        yield recorder
    forget_kernels()


def zeroed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: allocate(*args, **kwargs).zero_()


def forget_kernels() -> None:
    for info in pkgutil.iter_modules(kernels.__path__):
        for value in vars(importlib.import_module(f"{kernels.__name__}.{info.name}")).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()


@pytest.fixture
def windowed_base(base_folder: Path, tmp_path: Path) -> Path:
    """Sizes of the tiny base; only the second layer has a window."""
    own = AutoConfig.from_pretrained(base_folder)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "eos_token_id")  # fmt: skip
    config = Qwen2Config(
        **{name: getattr(own, name) for name in same}, use_sliding_window=True, sliding_window=24, max_window_layers=1
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "windowed")
    AutoTokenizer.from_pretrained(base_folder).save_pretrained(tmp_path / "windowed")
    return tmp_path / "windowed"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "settings",
    [
        {"graphs": True, "max_requests": 28, "max_adapters": 30, "max_tokens_per_step": 255},
        {"graphs": True, "max_requests": 40, "max_adapters": 7, "max_tokens_per_step": 64, "deterministic": True},
        {"graphs": False, "max_requests": 20, "max_adapters": 1, "max_tokens_per_step": 300},
        {"graphs": True, "max_requests": 8, "max_adapters": 3, "max_tokens_per_step": 64, "windowed": True},
    ],
    ids=["crowded", "deterministic", "no graphs", "windows"],
)
def test_no_step_launches_a_kernel_that_the_start_has_not_met(
    make_engine: Callable[..., Engine],
    base_folder: Path,
    windowed_base: Path,
    every_kind: Callable[..., dict[str, Path]],
    lora_folder: Callable[..., Path],
    recorder: Recorder,
    seed: int,
    settings: dict[str, Any],
) -> None:
    rng, settings = random.Random(seed), {"overlap": True, "num_pages": 400, "deterministic": False} | settings
    base = windowed_base if settings.pop("windowed", False) else base_folder
    engine = make_engine(base, **settings)
    engine._runner._compile()
    assert len(recorder.seen) > 10
    recorder.seen.clear()
    for number in range(3):
        folders = every_kind(seed + 9 * number)
        folders |= {f"lora-{n}": lora_folder(seed + 90 * number + n, 2) for n in range(9)}
        for name, folder in folders.items():
            engine.adapters.add(f"{name}-{number}", folder)
    names = engine.adapters.names()
    for number in range(80):
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30), temperature=rng.choice((0.0, 1.0)), top_p=rng.choice((1.0, 0.7)),
            logprobs=rng.choice((None, None, 2)), prompt_logprobs=rng.choice((None, None, None, 1)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)), ignore_eos=True,
        )  # fmt: skip
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice((1, 9, 9, 9, 90)))]
        engine.add_request(Request(prompt, rng.choice([None, *names]), params))
        if number % 40 == 39:
            while engine.has_work():
                engine.step()
    assert not recorder.seen
