"""Fine-tune a frozen language model with small adapters, and serve them.

    import peftkit
    from peftkit.methods import LoraConfig

    model, tokenizer = peftkit.load_base("smollm2-135m", quant="nf4")
    adapted = peftkit.attach(model, LoraConfig(r=16))
    peftkit.save_adapter(adapted, "runs/a")

Each name is imported when it is first used: `import peftkit` alone loads neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peftkit.artifact import load_adapter, save_adapter
    from peftkit.base import load_base
    from peftkit.merge import merge
    from peftkit.methods import attach

__all__ = ["load_base", "attach", "save_adapter", "load_adapter", "merge"]

_HOMES = {
    "load_base": "peftkit.base",
    "attach": "peftkit.methods",
    "save_adapter": "peftkit.artifact",
    "load_adapter": "peftkit.artifact",
}


def __getattr__(name: str) -> Any:
    if name == "merge":  # the package itself, which is callable
        return importlib.import_module("peftkit.merge")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'peftkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
