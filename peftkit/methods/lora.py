"""LoRA: low-rank updates of linear layers (Hu et al. 2021, arXiv:2106.09685).

For a frozen weight W (out, in) and input x (…, in):

    y = x Wᵀ + b + s · (drop(x) Aᵀ) Bᵀ        A (r, in), B (out, r)

with s = alpha / r, or alpha / √r for rank-stabilised LoRA (Kalajdzievski 2023, arXiv:2312.03732). A starts uniform in
±1/√in (Kaiming with a = √5, as HF PEFT) and B at zero, so that step 0 equals the base. A and B are float32 whatever
the base computes in. Over an NF4 base this is QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

DoRA (Liu et al. 2024, arXiv:2402.09353) also learns each output row's magnitude m (out,):

    y = c ∘ (x Wᵀ + s · (drop(x) Aᵀ) Bᵀ) + b        c = m / ‖W + s B A‖ by row, the norm without gradient (§4.3)

m starts at ‖W‖. The norm comes from ‖W‖² + 2s⟨W, BA⟩ + s²‖BA‖², with ⟨W, BA⟩ by row = Σ (W Aᵀ) ∘ B and ‖BA‖² by row =
Σ (B A Aᵀ) ∘ B, so that no out × in matrix is formed; W Aᵀ is the base layer applied to the rows of A.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftkit.errors import InputError, UnsupportedError, did_you_mean
from peftkit.methods.method import (
    Method,
    MethodSettings,
    exported,
    linear_shapes,
    match_names,
    match_regex,
    replace_module,
)

PREFIX = "base_model.model."
OUTPUT_EMBEDDING = "lm_head"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_regular_expression)]


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One adapted linear layer."""

    r: int
    scale: float
    out_features: int
    in_features: int


class LoraConfig(MethodSettings):
    """Settings of LoRA; the names at the file boundary are HF PEFT's (`lora_alpha`, `target_modules`, …)."""

    kind: Literal["lora"] = "lora"
    r: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """Strength of the update: it is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the update's inputs dropped in training."""
    targets: str | list[str] = "all-linear"
    """Layers to adapt: "all-linear" (all but the output embedding), a list of names, or a regular expression."""
    exclude: str | list[str] = Field(default_factory=list)
    """Layers to leave out: a list of names or a regular expression."""
    layers_to_transform: list[int] | None = None
    """Indices of the decoder layers to adapt; null adapts all."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Name or regular expression → rank; the first that matches wins."""
    alpha_pattern: dict[Pattern, float] = Field(default_factory=dict)
    """Name or regular expression → alpha; the first that matches wins."""
    variant: Literal["plain", "rslora", "dora"] = "plain"
    """rslora scales by alpha / √r; dora also learns a magnitude for each output."""

    def resolve(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LoraSite]:
        """The layers that this config adapts, among modules of the given (out, in) shapes.

        Raises InputError for a name, pattern or layer index that matches nothing, UnsupportedError for the output
        embedding.
        """
        paths = self._targeted(shapes)
        for field in ("rank_pattern", "alpha_pattern"):
            for key in getattr(self, field):
                if not any(_hits(key, path) for path in paths):
                    names = {path.rsplit(".", 1)[-1] for path in paths}
                    raise InputError(
                        f"{field}: '{key}' matches no adapted layer{did_you_mean(key, names)}", field=field
                    )
        return {path: self._site(path, shapes[path]) for path in sorted(paths)}

    def identity(self) -> dict[str, Any]:
        def ordered(names: str | list[str]) -> str | list[str]:
            return names if isinstance(names, str) else sorted(set(names))

        return {
            "kind": self.kind,
            "r": self.r,
            "alpha": self.alpha,
            "targets": ordered(self.targets),
            "exclude": ordered(self.exclude),
            "layers_to_transform": None if self.layers_to_transform is None else sorted(set(self.layers_to_transform)),
            "rank_pattern": list(self.rank_pattern.items()),
            "alpha_pattern": list(self.alpha_pattern.items()),
            "variant": self.variant,
        }

    def _targeted(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        candidates = [path for path in shapes if _LAYER.search(path) or path == OUTPUT_EMBEDDING]
        if self.layers_to_transform is not None:
            candidates = self._in_layers(candidates)
        if isinstance(self.targets, list):
            if not self.targets:
                raise InputError("targets is empty: name the layers to adapt, or write all-linear", field="targets")
            paths = match_names(self.targets, candidates, "targets")
        elif self.targets.lower() == "all-linear":
            paths = {path for path in candidates if path != OUTPUT_EMBEDDING}
        else:
            paths = match_regex(self.targets, candidates, "targets")
        if self.exclude:
            match = match_names if isinstance(self.exclude, list) else match_regex
            paths -= match(self.exclude, candidates, "exclude")  # type: ignore[arg-type]
        if OUTPUT_EMBEDDING in paths:
            raise UnsupportedError("targets: LoRA on lm_head isn't supported", field="targets")
        if not paths:
            raise InputError("targets and exclude leave no layer to adapt", field="targets")
        return paths

    def _in_layers(self, paths: list[str]) -> list[str]:
        assert self.layers_to_transform is not None
        by_layer = {path: int(found.group(1)) for path in paths if (found := _LAYER.search(path))}
        for index in self.layers_to_transform:
            if index not in by_layer.values():
                last = max(by_layer.values(), default=-1)
                raise InputError(
                    f"layers_to_transform: there is no layer {index}, this model has 0 to {last}",
                    field="layers_to_transform",
                )
        return [path for path, index in by_layer.items() if index in self.layers_to_transform]

    def _site(self, path: str, shape: tuple[int, ...]) -> LoraSite:
        r = next((rank for key, rank in self.rank_pattern.items() if _hits(key, path)), self.r)
        alpha = next((value for key, value in self.alpha_pattern.items() if _hits(key, path)), self.alpha)
        scale = alpha / (math.sqrt(r) if self.variant == "rslora" else r)
        return LoraSite(r=r, scale=scale, out_features=shape[0], in_features=shape[1])


def _hits(key: str, path: str) -> bool:
    """HF PEFT's rule for the keys of rank_pattern and alpha_pattern."""
    return re.match(rf"(.*\.)?({key})$", path) is not None


class LoraLinear(nn.Module):
    """A frozen linear layer with its LoRA update. x (…, in) → y (…, out) in the base layer's dtype."""

    def __init__(self, base_layer: nn.Linear, site: LoraSite, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        device = base_layer.weight.device
        lora_A = torch.empty(site.r, site.in_features)
        nn.init.kaiming_uniform_(lora_A, a=math.sqrt(5), generator=generator)
        self.base_layer = base_layer
        self.lora_A = nn.Parameter(lora_A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(site.out_features, site.r, device=device))
        self.scale = site.scale
        self.dropout = dropout
        self.in_features, self.out_features = site.in_features, site.out_features
        self.train(base_layer.training)

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a layer for its dtype or device."""
        return self.base_layer.weight

    def named_tensors(self) -> dict[str, nn.Parameter]:
        """The adapter's parameters by the end of their PEFT keys."""
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}

    def update(self, x: Tensor) -> Tensor:
        """s · (drop(x) Aᵀ) Bᵀ, float32 (…, out)."""
        h = F.dropout(x, self.dropout, self.training).to(self.lora_A.dtype)
        return F.linear(F.linear(h, self.lora_A), self.lora_B) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y + self.update(x).to(y.dtype)


class DoraLinear(LoraLinear):
    """A `LoraLinear` whose output rows have learned magnitudes."""

    def __init__(self, base_layer: nn.Linear, site: LoraSite, dropout: float, generator: torch.Generator) -> None:
        super().__init__(base_layer, site, dropout, generator)
        self.square_O: Tensor
        """‖W‖² by row."""
        self.register_buffer("square_O", _dense(base_layer).float().square().sum(1), persistent=False)
        self.lora_magnitude_vector = nn.Parameter(self.square_O.sqrt())

    def named_tensors(self) -> dict[str, nn.Parameter]:
        return {**super().named_tensors(), "lora_magnitude_vector": self.lora_magnitude_vector}

    def row_norms(self) -> Tensor:
        """‖W + s B A‖ by row, float32 (out,), without gradient."""
        with torch.no_grad():
            A, B = self.lora_A, self.lora_B
            product_RO = self._unbiased(A.to(self._compute_dtype())).float()
            cross_O = (product_RO.T * B).sum(1)
            update_O = ((B @ (A @ A.T)) * B).sum(1)
            square_O = self.square_O + 2 * self.scale * cross_O + self.scale**2 * update_O
            return square_O.clamp(min=torch.finfo(torch.float32).tiny).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        c = self.lora_magnitude_vector / self.row_norms()
        y = c * (self._unbiased(x) + self.update(x))
        if self.base_layer.bias is not None:
            y = y + self.base_layer.bias
        return y.to(x.dtype)

    def _unbiased(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y if self.base_layer.bias is None else y - self.base_layer.bias

    def _compute_dtype(self) -> torch.dtype:
        weight = self.base_layer.weight
        return weight.dtype if weight.is_floating_point() else self.lora_A.dtype


def _dense(layer: nn.Linear) -> Tensor:
    """A layer's weight (out, in) as it multiplies by it: an NF4 weight dequantised."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        return layer.weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, state)


class Lora(Method):
    """LoRA attached to a model: each site's layer is wrapped in a `LoraLinear`."""

    kind: ClassVar[str] = "lora"

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, generator: torch.Generator) -> None:
        self.config = config
        self._model = model
        self._layers: dict[str, LoraLinear] = {}
        for path, site in config.resolve(linear_shapes(model)).items():
            base_layer = model.get_submodule(path)
            assert isinstance(base_layer, nn.Linear)
            kind = DoraLinear if config.variant == "dora" else LoraLinear
            self._layers[path] = kind(base_layer, site, config.dropout, generator)
        for path, layer in self._layers.items():
            replace_module(model, path, layer)

    @property
    def layers(self) -> Mapping[str, LoraLinear]:
        """Module path → wrapped layer."""
        return self._layers

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{PREFIX}{path}.{name}": parameter
            for path, layer in self._layers.items()
            for name, parameter in layer.named_tensors().items()
        }

    def export(self) -> dict[str, Tensor]:
        return {name: exported(parameter) for name, parameter in self.parameters().items()}

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters().items()}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(tensors[name])

    def detach(self) -> None:
        for path, layer in self._layers.items():
            replace_module(self._model, path, layer.base_layer)


def expected_tensors(config: LoraConfig, sites: Mapping[str, LoraSite]) -> dict[str, tuple[int, ...]]:
    """PEFT key → shape of the tensors of a LoRA with the given sites."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, site in sites.items():
        shapes[f"{PREFIX}{path}.lora_A.weight"] = (site.r, site.in_features)
        shapes[f"{PREFIX}{path}.lora_B.weight"] = (site.out_features, site.r)
        if config.variant == "dora":
            shapes[f"{PREFIX}{path}.lora_magnitude_vector"] = (site.out_features,)
    return shapes
