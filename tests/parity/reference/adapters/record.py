"""Records what the `adapters` library saves and computes, for the parity tests beside this folder.

    python -m venv V && V/bin/pip install torch==2.13.0 && V/bin/pip install adapters==1.3.0
    V/bin/python record.py              writes the recorded files anew
    V/bin/python record.py check DIR    loads DIR/<case> of every case, written by peftkit, and compares its logits

The library keeps to transformers 4, so it can't share an environment with peftkit. One set of random weights serves
the bases of every family; each takes the tensors that it has. Everything is float32.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import adapters
from adapters import DoubleSeqBnConfig, ParBnConfig, SeqBnConfig

HERE = Path(__file__).parent
NAME = "foo"
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CASES: dict[str, adapters.BnConfig] = {
    "llama-houlsby": DoubleSeqBnConfig(reduction_factor=8),
    "llama-pfeiffer": SeqBnConfig(reduction_factor=8),
    "llama-parallel": ParBnConfig(reduction_factor=8),
    "llama-houlsby-norm-gelu": DoubleSeqBnConfig(reduction_factor=8, ln_before=True, non_linearity="gelu"),
    "llama-pfeiffer-norm-scaled": SeqBnConfig(reduction_factor=6, ln_before=True, scaling=0.5),
    "llama-parallel-norm-tanh": ParBnConfig(reduction_factor=7.5, ln_before=True, non_linearity="tanh", scaling=2.0),
    "llama-houlsby-leave-out-first": DoubleSeqBnConfig(reduction_factor=8, leave_out=[0]),
    "llama-pfeiffer-leave-out-last": SeqBnConfig(
        reduction_factor=8, leave_out=[1], non_linearity="gelu_new", dropout=0.1
    ),
    "llama-parallel-wide": ParBnConfig(reduction_factor=0.75, leave_out=[1], non_linearity="silu"),
    **{
        f"{family}-{name}": config
        for family in ("mistral", "qwen2", "qwen3")
        for name, config in (
            ("houlsby", DoubleSeqBnConfig(reduction_factor=8)),
            ("pfeiffer", SeqBnConfig(reduction_factor=8)),
            ("parallel", ParBnConfig(reduction_factor=8)),
        )
    },
}
WITH_HEAD = "llama-houlsby"
"""The case saved as `save_adapter` does by default, the whole output layer beside the adapter."""


def new_model(family: str, weights: dict[str, Tensor]) -> Any:
    config = AutoConfig.for_model(family, **SHAPE)
    config.name_or_path = f"tiny/{family}"
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def random_weights() -> dict[str, Tensor]:
    """Weights for every family; norms lie near one."""
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}
    for family in FAMILIES:
        for name, tensor in (
            AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE)).state_dict().items()
        ):
            centre, spread = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.2)
            weights.setdefault(name, centre + spread * torch.randn(tensor.shape))
    return weights


def logits_of(model: Any, input_ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids).logits.contiguous()


def save(model: Any, folder: Path, *, with_head: bool) -> None:
    """Saves as safetensors. The library can't do that for an input norm, held twice: then its .bin is converted."""
    with tempfile.TemporaryDirectory() as pickled:
        model.save_adapter(pickled, NAME, with_head=with_head)
        tensors = torch.load(Path(pickled) / "pytorch_adapter.bin", weights_only=True)
    try:
        model.save_adapter(str(folder), NAME, with_head=with_head, use_safetensors=True)
    except RuntimeError as error:
        if "share memory" not in str(error):
            raise
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter.safetensors")
        print(f"  {folder.name}: converted from the .bin")
    saved = load_file(folder / "adapter.safetensors")
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], tensors[name]) for name in saved)


def record() -> None:
    weights = random_weights()
    save_file(weights, HERE / "base.safetensors")
    (HERE / "base.json").write_text(json.dumps(SHAPE, indent=2) + "\n")
    recorded: dict[str, Tensor] = {"input_ids": torch.randint(SHAPE["vocab_size"], (2, 9))}
    for family in FAMILIES:
        recorded[family] = logits_of(new_model(family, weights), recorded["input_ids"])
    for case, config in CASES.items():
        shutil.rmtree(HERE / case, ignore_errors=True)
        family = case.split("-")[0]
        model = new_model(family, weights)
        adapters.init(model)
        model.add_adapter(NAME, config=config)
        for name, parameter in model.named_parameters():
            if f".adapters.{NAME}." in name:
                parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
        model.eval().set_active_adapters(NAME)
        recorded[case] = logits_of(model, recorded["input_ids"])
        save(model, HERE / case, with_head=case == WITH_HEAD)
        effect = (recorded[case] - recorded[family]).abs().max().item()
        print(f"{case}: moves the logits by {effect:.2f}")
    save_file(recorded, HERE / "logits.safetensors")
    versions = {module.__name__: module.__version__ for module in (adapters, transformers, torch)}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def check(folder: Path) -> None:
    """Exits with an error unless the library loads every case whole and computes what it once recorded."""
    weights, recorded = load_file(HERE / "base.safetensors"), load_file(HERE / "logits.safetensors")
    worst = 0.0
    for case in CASES:
        model = new_model(case.split("-")[0], weights)
        adapters.init(model)
        info: dict[str, list[str]] = {}
        name = model.load_adapter(str(folder / case), use_safetensors=True, set_active=True, loading_info=info)
        model.eval()
        unexpected = [key for key in info["unexpected_keys"] if ".adapters." in key]
        assert not info["missing_keys"] and not unexpected, (case, info)
        difference = (logits_of(model, recorded["input_ids"]) - recorded[case]).abs().max().item()
        print(f"{case}: loaded as '{name}', logits differ by {difference:.1e}")
        worst = max(worst, difference)
    sys.exit(f"differs by {worst}" if worst > 1e-5 else 0)


if __name__ == "__main__":
    check(Path(sys.argv[2])) if sys.argv[1:2] == ["check"] else record()
