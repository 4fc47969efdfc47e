"""Starts of LoRA other than from nothing: PiSSA and LoftQ, over a base that stays frozen and shared.

With [·]_r the best approximation of rank r, from a singular value decomposition, and its two factors √Σ-weighted:

    pissa    s B₀ A₀ = [W]_r          the layer computes W x + s (B A − B₀ A₀) x        arXiv:2404.02948
    loftq    s B₀ A₀ = [W − Q]_r      the layer computes Q x + s B A x                  arXiv:2310.08659

W is the weight that training multiplies by, for loftq the one that the base's folder holds, and Q = dequantise(NF4(W)).
PiSSA so starts at the base it is trained on, and LoftQ near the one that was quantised.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peftkit.base import BaseInfo
from peftkit.errors import InputError
from peftkit.methods.frozen import stored
from peftkit.methods.lora_config import LoraConfig
from peftkit.methods.lora_layers import LoraLayer

_OVERSAMPLING = 16
_ITERATIONS = 4


def begin(
    model: PreTrainedModel, layers: Mapping[str, LoraLayer], config: LoraConfig, generator: torch.Generator
) -> None:
    """Gives the layers, by module path, the start that `config.init` names. Raises InputError where it can't be had."""
    if config.init == "default":
        return
    quantised = {path for path, layer in layers.items() if hasattr(layer.weight, "quant_state")}
    info: BaseInfo | None = getattr(model, "peftkit_base", None)
    if config.init == "loftq" and (not quantised or info is None):
        raise InputError("init: loftq makes up for what NF4 rounds away, and this base isn't held in NF4", field="init")
    for path, layer in layers.items():
        _check_start(config, path, layer)
        if config.init == "pissa":
            layer.begin(*principal(layer.dense().float(), len(layer.lora_A), layer.scale, generator), subtracted=True)
        elif path in quantised:
            assert info is not None
            held = layer.dense().float()
            lost = stored(info.path, f"{path}.weight").to(held) - held
            layer.begin(*principal(lost, len(layer.lora_A), layer.scale, generator), subtracted=False)


def principal(matrix: Tensor, r: int, scale: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A (r, in) and B (out, r) with scale · B A the approximation of rank r of `matrix` (out, in).

    By randomised subspace iteration (Halko et al. 2011, arXiv:0909.4061), as a whole decomposition takes minutes a
    matrix in large models.
    """
    size = min(r + _OVERSAMPLING, *matrix.shape)
    basis = matrix @ torch.randn(matrix.shape[1], size, generator=generator).to(matrix)
    for _ in range(_ITERATIONS):
        basis = matrix @ torch.linalg.qr(matrix.T @ torch.linalg.qr(basis).Q).Q
    basis = torch.linalg.qr(basis).Q
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    root = (values[:r] / scale).sqrt()
    return root[:, None] * right[:r], (basis @ left[:, :r]) * root


def _check_start(config: LoraConfig, path: str, layer: LoraLayer) -> None:
    r, most = len(layer.lora_A), min(layer.lora_A.shape[1], layer.lora_B.shape[0])
    if r > most:
        raise InputError(f"init: {config.init} can't start a rank of {r} at {path}, which has {most}", field="init")
    if layer.scale <= 0:
        raise InputError(f"init: {config.init} needs an alpha above 0 at {path}", field="init")
