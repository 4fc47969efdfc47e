"""The names that people import, as the documentation shows them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import peftkit
from peftkit.methods import LoraConfig, attached, detach


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_peftkit_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pydantic', 'bitsandbytes'}"
    assert python(f"import sys, peftkit; print({heavy} & set(sys.modules))") == "set()"


def test_every_public_name_can_be_reached_and_no_other() -> None:
    for name in peftkit.__all__:
        assert callable(getattr(peftkit, name)) and name in dir(peftkit)
    with pytest.raises(AttributeError, match="no attribute 'load_bse'"):
        _ = peftkit.load_bse  # type: ignore[attr-defined]


def test_merge_is_callable_before_and_after_its_submodules_are_imported() -> None:
    code = "import peftkit; before = peftkit.merge; import peftkit.merge.delta; after = peftkit.merge"
    assert python(f"{code}; print(callable(before), before is after, after.__name__)") == "True True peftkit.merge"


def test_the_documented_steps_run_in_order(seed: int, tiny_base: Path, tmp_path: Path) -> None:
    model, _ = peftkit.load_base(tiny_base, quant="nf4")
    adapted = peftkit.attach(model, LoraConfig(r=4))
    assert adapted is model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    torch.nn.init.normal_(next(iter(attached(model)[0].parameters().values())))
    peftkit.save_adapter(adapted, tmp_path / "a")
    peftkit.load_adapter(detach(model), tmp_path / "a")
    merged = peftkit.merge(model, [str(tmp_path / "a")])
    assert type(merged).__name__ == "LlamaForCausalLM" and not hasattr(merged.config, "quantization_config")
