"""What is compared: the tasks with their budgets, the methods as both libraries have them, the learning rates tried."""

from dataclasses import dataclass
from typing import Any

from peftkit.evaluate import Metric
from peftkit.methods import (
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
)

WARMUP = 0.06
VIRTUAL_TOKENS = 20


@dataclass(frozen=True)
class Task:
    """A data set with the budget that every method gets."""

    steps: int
    batch_size: int
    metrics: tuple[Metric, ...]
    """The first decides."""
    init_text: str


TASKS: dict[str, Task] = {
    "sentiment": Task(
        60,
        8,
        ("accuracy", "nll"),
        "Decide whether this customer review is positive or negative in its sentiment overall.",
    ),
    "address": Task(
        60,
        8,
        ("field_f1", "exact_match"),
        "Split this United States postal address into JSON fields: number, street, unit, box, city, state, zip.",
    ),
    "g2p": Task(
        150, 16, ("rouge_l", "exact_match"), "Write the phonemes of this spelled English word, one after another."
    ),
    "modernize": Task(100, 8, ("rouge_l", "nll"), "Rewrite this archaic Bible verse in plain modern English."),
}

RATES: dict[str, tuple[float, ...]] = {
    "lora": (5e-4, 1e-3, 2e-3, 4e-3),
    "bottleneck": (3e-4, 1e-3, 2e-3, 4e-3),
    "prefix": (2e-4, 5e-4, 2e-3, 5e-3),
    "ptuning_v2": (5e-3, 1e-2, 2e-2, 4e-2),
    "ptuning": (1e-4, 3e-4, 1e-3, 2e-3),
    "prompt": (1e-2, 3e-2, 1e-1, 2e-1),
    "full": (2e-5, 5e-5, 1e-4),
}
"""Learning rates that are tried on the validation rows, for both libraries alike."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora-plus": ("lora", {"lr_ratio": 4.0}),
    "lora-pissa": ("lora", {"init": "pissa"}),
    "prefix-narrow": ("prefix", {"encoder_hidden_size": 128}),
    "ptuning-random": ("ptuning", {"init": "random", "init_text": None}),
    "ptuning-random-40": ("ptuning", {"init": "random", "init_text": None, "num_virtual_tokens": 40}),
    "prompt-20": ("prompt", {"num_virtual_tokens": 20}),
}
"""Other settings of a method that can be tried by name: `--methods lora,lora-plus --trials-only`."""


def our_config(method: str, task: Task) -> AnyConfig:
    """A method, or a variant of one, as peftkit trains it: the settings of the recipe that ships for it."""
    if method in VARIANTS:
        of, settings = VARIANTS[method]
        return type(our_config(of, task)).model_validate(our_config(of, task).model_dump() | settings)
    text: dict[str, Any] = {"num_virtual_tokens": VIRTUAL_TOKENS, "init_text": task.init_text}
    configs: dict[str, AnyConfig] = {
        "lora": LoraConfig(r=16, alpha=32),
        "bottleneck": BottleneckConfig(variant="houlsby", bottleneck_size=32),
        "prefix": PrefixTuningConfig(**text),
        "ptuning_v2": PTuningV2Config(**text),
        "ptuning": PTuningConfig(**text),
        "prompt": PromptTuningConfig(**text | {"num_virtual_tokens": 50}),
    }
    return configs[method]


def peer_config(method: str, task: Task, base: str) -> Any:
    """The same as HF PEFT has it, with the best of its own starts; it has no bottleneck adapters."""
    import peft

    common: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    virtual = {**common, "num_virtual_tokens": VIRTUAL_TOKENS}
    match method:
        case "lora":
            return peft.LoraConfig(**common, r=16, lora_alpha=32, target_modules="all-linear")
        case "prompt":
            text = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": task.init_text}
            return peft.PromptTuningConfig(**virtual, **text, tokenizer_name_or_path=base)
        case "ptuning":
            return peft.PromptEncoderConfig(**virtual)
        case "ptuning_v2":
            return peft.PrefixTuningConfig(**virtual, init_weights="zero")
        case "prefix":
            return peft.PrefixTuningConfig(**virtual, prefix_projection=True)
        case _:
            raise KeyError(method)


PEER_METHODS = ("lora", "prefix", "ptuning_v2", "ptuning", "prompt")
OUR_METHODS = ("lora", "bottleneck", "prefix", "ptuning_v2", "ptuning", "prompt", "full")
