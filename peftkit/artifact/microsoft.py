"""LoRA as microsoft/LoRA (loralib) saves it: a state dict of `MODULE.lora_A` (r, in) and `MODULE.lora_B` (out, r).

It says neither which strength the update has nor which base it is for. A file of safetensors is read; torch's pickled
files are refused with the command that converts them.
"""

import re
from collections import Counter
from pathlib import Path

from torch import Tensor

from peftkit.artifact.files import read_tensors
from peftkit.errors import AdapterError, InputError, UnsupportedError
from peftkit.methods import LoraConfig
from peftkit.methods.lora import ENDS, PREFIX

_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])")


def read_microsoft_lora(path: str | Path, *, alpha: float | None) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Reads a file of loralib's `lora_state_dict`: our config, and CPU tensors by our keys.

    `alpha` is loralib's `lora_alpha`, which its file doesn't hold. Raises AdapterError for a damaged or incomplete
    file, UnsupportedError for what isn't a plain LoRA of linear layers, InputError without `alpha`.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        target = path.with_suffix(".safetensors").name
        raise AdapterError(
            f"{path} is pickled, and isn't loaded: convert it there with "
            f"python -c 'import torch, safetensors.torch as s; "
            f's.save_file({{k: v.clone() for k, v in torch.load("{path.name}", weights_only=True).items()}}, '
            f'"{target}")\''
        )
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(path.parent, path.name, path.name).items():
        found = _KEY.fullmatch(key)
        if found is None or tensor.dim() != 2:
            raise UnsupportedError(f"{path}: {key} isn't lora_A or lora_B of a linear layer: biases can't be honoured")
        sides.setdefault(found["path"], {})[found["side"]] = tensor
    if alpha is None:
        raise InputError(
            f"{path} doesn't hold the strength of its update: give its lora_alpha with --alpha", field="alpha"
        )
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for module, pair in sides.items():
        ranks[module] = _rank(module, pair, path)
        tensors |= {f"{PREFIX}{module}.lora_{side}.weight": pair[side] for side in "AB"}
    r = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != r}
    return LoraConfig(r=r, alpha=alpha, targets=sorted(ranks), rank_pattern=others), tensors


def _rank(module: str, pair: dict[str, Tensor], path: Path) -> int:
    if set(pair) != {"A", "B"}:
        raise AdapterError(f"{path}: {module} has only lora_{next(iter(pair))}")
    if module == ENDS[0]:
        raise UnsupportedError(
            f"{path}: {module}: an embedding's LoRA is laid out in another way there, and isn't read"
        )
    if pair["A"].shape[0] != pair["B"].shape[1]:
        raise UnsupportedError(
            f"{path}: {module} has ranks {pair['A'].shape[0]} and {pair['B'].shape[1]}: a MergedLinear packs several "
            "projections into one, which can't be honoured"
        )
    return pair["A"].shape[0]
