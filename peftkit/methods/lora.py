"""LoRA: low-rank updates of a model's layers (Hu et al. 2021, arXiv:2106.09685).

For a frozen weight W (out, in) and input x (…, in):

    y = x Wᵀ + b + s · (drop(x) Aᵀ) Bᵀ        A (r, in), B (out, r)

with s = alpha / r, or alpha / √r for rank-stabilised LoRA (Kalajdzievski 2023, arXiv:2312.03732). A starts uniform in
±1/√in (Kaiming with a = √5, as HF PEFT) and B at zero, so that step 0 equals the base; other starts are in
`lora_init.py`. A and B are float32 whatever the base computes in. Over an NF4 base this is QLoRA (Dettmers et al. 2023,
arXiv:2305.14314). With `lr_ratio` B learns faster than A (LoRA+, Hayou et al. 2024, arXiv:2402.12354).

DoRA (Liu et al. 2024, arXiv:2402.09353) also learns each output row's magnitude m (out,):

    y = c ∘ (x Wᵀ + s · (drop(x) Aᵀ) Bᵀ) + b        c = m / ‖W + s B A‖ by row, the norm without gradient (§4.3)

m starts at ‖W‖. The norm comes from ‖W‖² + 2s⟨W, BA⟩ + s²‖BA‖², with ⟨W, BA⟩ by row = Σ (W Aᵀ) ∘ B and ‖BA‖² by row =
Σ (B A Aᵀ) ∘ B, so that no out × in matrix is formed; W Aᵀ is the base layer applied to the rows of A.

An embedding of V tokens is a layer whose inputs are unit vectors: W is its transpose (H, V), A (r, V), B (H, r). Beside
the low-rank updates an adapter may hold whole modules (`modules_to_save`) and rows of embeddings
(`trainable_token_indices`), which stand in the place of the base's.

Tied embeddings: an adapter changes the module that it names and no other, though its weight be shared: LoRA on the
input embedding leaves the output embedding as it is, and the other way round. Only token rows of the input embedding
count for a tied output embedding too. HF PEFT does the same. A merged model is tied where the two ends come out
equal, and else has two weights and `tie_word_embeddings: false`.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftkit.errors import InputError
from peftkit.methods.lora_config import EMBEDDING, ENDS, HEAD, PREFIX, LoraConfig, LoraSite
from peftkit.methods.lora_init import begin
from peftkit.methods.lora_layers import Adapted, LoraEmbedding, LoraLayer, LoraLinear, TokenRows, WholeModule
from peftkit.methods.method import Method, base_shapes, exported, matrices, replace_module

__all__ = ["EMBEDDING", "ENDS", "HEAD", "PREFIX", "Lora", "LoraConfig", "LoraSite", "is_tied"]


class Lora(Method):
    """LoRA attached to a model: each module that it changes is wrapped."""

    kind: ClassVar[str] = "lora"

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, generator: torch.Generator) -> None:
        self.config = config
        self._model = model
        parameters, tied = base_shapes(model), is_tied(model.config)
        shapes = matrices(parameters)
        sites, saved, rows = config.resolve(shapes), config.saved(parameters), config.token_rows(shapes, tied=tied)
        config.check_apart(sites, saved, rows, tied=tied)
        updated: dict[str, LoraLayer] = {}
        for path, site in sites.items():
            kind = LoraEmbedding if site.embedding else LoraLinear
            updated[path] = kind(model.get_submodule(path), site, config, generator)
        begin(model, updated, config, generator)
        self._layers: dict[str, Adapted] = {**updated}
        for path, names in saved.items():
            self._layers[path] = WholeModule(_unquantised(model, path), names)
        for path, ids in rows.items():
            self._layers[path] = TokenRows(model.get_submodule(path), ids)
        source = self._layers.get(EMBEDDING)
        if tied and isinstance(source, TokenRows) and HEAD not in rows:
            self._layers[HEAD] = TokenRows(model.get_submodule(HEAD), rows[EMBEDDING], source.rows_NH)
        for path, layer in self._layers.items():
            replace_module(model, path, layer)

    @property
    def layers(self) -> Mapping[str, Adapted]:
        """Module path → wrapped module."""
        return self._layers

    @property
    def exported_config(self) -> LoraConfig:
        """That of a plain LoRA: what a start subtracts for good doubles the rank, and alpha keeps the scale."""
        if self.config.init != "pissa":
            return self.config.model_copy(update={"init": "default"})
        factor = math.sqrt(2) if self.config.variant == "rslora" else 2.0
        return self.config.model_copy(
            update={
                "init": "default",
                "r": 2 * self.config.r,
                "alpha": factor * self.config.alpha,
                "rank_pattern": {key: 2 * r for key, r in self.config.rank_pattern.items()},
                "alpha_pattern": {key: factor * alpha for key, alpha in self.config.alpha_pattern.items()},
            }
        )

    def lr_factors(self) -> dict[str, float]:
        if self.config.lr_ratio == 1.0:
            return {}
        ends = (LoraLinear.NAME_B, LoraEmbedding.NAME_B)
        return {name: self.config.lr_ratio for name in self.parameters() if name.endswith(ends)}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{PREFIX}{path}.{end}": parameter
            for path, layer in self._layers.items()
            for end, parameter in layer.trained().items()
        }

    def export(self) -> dict[str, Tensor]:
        return {name: exported(tensor) for name, tensor in self._tensors().items()}

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        for path, layer in self._layers.items():
            layer.assign({end: tensors[f"{PREFIX}{path}.{end}"] for end in layer.tensors()})

    def detach(self) -> None:
        for path, layer in self._layers.items():
            replace_module(self._model, path, layer.base_layer)

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{PREFIX}{path}.{end}": tensor
            for path, layer in self._layers.items()
            for end, tensor in layer.tensors().items()
        }


def is_tied(config: PretrainedConfig) -> bool:
    """Whether the output embedding of a model has the input embedding's weight."""
    return bool(config.tie_word_embeddings)


def _unquantised(model: PreTrainedModel, path: str) -> nn.Module:
    module = model.get_submodule(path)
    if hasattr(module.weight, "quant_state"):
        raise InputError(
            f"modules_to_save: {path} is held in 4 bits and can't be trained whole: adapt it by targets, or use "
            "quant none",
            field="modules_to_save",
        )
    return module
