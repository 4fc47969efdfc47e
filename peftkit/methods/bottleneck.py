"""Bottleneck adapters: small two-layer networks beside a decoder layer's sub-layers.

    A(x) = s · (W_up φ(W_down n(x) + b_down) + b_up)          W_down (b, H), W_up (H, b), n identity or a layer norm

With a the attention's output, m the feed-forward's, r and r' = r + a (+ its adapter) the residual stream before each:

    houlsby    a ← a + A₁(a),   m ← m + A₂(m)                 Houlsby et al. 2019, arXiv:1902.00751
    pfeiffer                    m ← m + A₂(r' + m)            Pfeiffer et al. 2021, arXiv:2005.00247
    parallel                    m ← m + A₂(r')                He et al. 2022, arXiv:2110.04366

all before the sub-layer's residual add, with r' as it is before its norm: as the `adapters` library has them on Llama,
Mistral, Qwen2 and Qwen3. W_up and b_up start at zero, so that step 0 equals the base; the library starts so only for
parallel. The weights are float32 whatever the base computes in; the base's norms stay frozen.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from peftkit.errors import InputError
from peftkit.methods.method import MAX_RANK, MAX_STRENGTH, Method, MethodSettings, exported, seeded

PREFIX = "base_model.model.model.layers."
Variant = Literal["houlsby", "pfeiffer", "parallel"]
NonLinearity = Literal["relu", "gelu", "gelu_new", "silu", "swish", "tanh"]

# the adapters library's defaults: reduction factor, non-linearity, scaling
_DEFAULTS: dict[str, tuple[float, NonLinearity, float]] = {
    "houlsby": (16.0, "swish", 1.0),
    "pfeiffer": (16.0, "relu", 1.0),
    "parallel": (2.0, "relu", 4.0),
}


class BottleneckConfig(MethodSettings):
    """Settings of bottleneck adapters; what is null takes the variant's usual value."""

    kind: Literal["bottleneck"] = "bottleneck"
    variant: Variant = "houlsby"
    """Where the adapters stand: houlsby after attention and feed-forward, pfeiffer and parallel at the feed-forward."""
    reduction_factor: float | None = Field(default=None, ge=1.0)
    """Hidden size over bottleneck size; null is 16, for parallel 2."""
    bottleneck_size: int | None = Field(default=None, ge=1, le=MAX_RANK)
    """Width of the bottleneck, in the place of reduction_factor."""
    non_linearity: NonLinearity | None = None
    """Null is swish for houlsby, relu for the others."""
    scaling: float | None = Field(default=None, ge=-MAX_STRENGTH, le=MAX_STRENGTH)
    """Factor on the adapter's output; null is 1, for parallel 4."""
    ln_before: bool = False
    """A trained layer norm on the adapter's input."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the adapter's outputs dropped in training."""
    layers_to_transform: list[int] | None = None
    """Indices of the decoder layers that get adapters; null is all."""

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if self.bottleneck_size is not None and self.reduction_factor is not None:
            raise ValueError("bottleneck_size and reduction_factor both give the width: leave one of them out")
        return self

    def resolved(self, hidden_size: int) -> "BottleneckConfig":
        """The same with every null replaced, and the width as `bottleneck_size`."""
        factor, non_linearity, scaling = _DEFAULTS[self.variant]
        size = self.bottleneck_size or max(1, int(hidden_size // (self.reduction_factor or factor)))
        return self.model_copy(
            update={
                "reduction_factor": None,
                "bottleneck_size": size,
                "non_linearity": self.non_linearity or non_linearity,
                "scaling": scaling if self.scaling is None else self.scaling,
            }
        )

    def identity(self) -> dict[str, Any]:
        assert self.bottleneck_size is not None, "an adapter's identity is that of its resolved config"
        layers = None if self.layers_to_transform is None else sorted(set(self.layers_to_transform))
        fields = self.model_dump(
            include={"kind", "variant", "bottleneck_size", "non_linearity", "scaling", "ln_before"}
        )
        return {**fields, "layers_to_transform": layers}

    def places(self, num_layers: int) -> list[str]:
        """`{layer}.attn_adapter` and `{layer}.mlp_adapter` of each adapter; InputError for none, or one not there."""
        if self.layers_to_transform == []:
            raise InputError(
                "layers_to_transform is empty: name the layers, or write null for all", field="layers_to_transform"
            )
        layers = range(num_layers) if self.layers_to_transform is None else sorted(set(self.layers_to_transform))
        for layer in layers:
            if not 0 <= layer < num_layers:
                raise InputError(
                    f"layers_to_transform: there is no layer {layer}, this model has 0 to {num_layers - 1}",
                    field="layers_to_transform",
                )
        names = ("attn_adapter", "mlp_adapter") if self.variant == "houlsby" else ("mlp_adapter",)
        return [f"{layer}.{name}" for layer in layers for name in names]

    def expected_tensors(self, num_layers: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Key → shape of the tensors of an adapter with this config."""
        H, b = hidden_size, self.resolved(hidden_size).bottleneck_size
        assert b is not None
        parts = {"down.weight": (b, H), "down.bias": (b,), "up.weight": (H, b), "up.bias": (H,)}
        if self.ln_before:
            parts |= {"norm.weight": (H,), "norm.bias": (H,)}
        return {f"{PREFIX}{place}.{part}": shape for place in self.places(num_layers) for part, shape in parts.items()}


class Bottleneck(nn.Module):
    """A(x) for x (…, H), computed in float32 and given back in x's dtype."""

    def __init__(self, config: BottleneckConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.bottleneck_size is not None and config.non_linearity is not None and config.scaling is not None
        self.norm = nn.LayerNorm(hidden_size) if config.ln_before else None
        self.down = nn.Linear(hidden_size, config.bottleneck_size)
        self.up = nn.Linear(config.bottleneck_size, hidden_size)
        self.activation = ACT2FN[config.non_linearity]
        self.dropout = nn.Dropout(config.dropout)
        self.scaling = config.scaling
        nn.init.normal_(self.down.weight, std=0.02)
        for zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.down.weight.dtype)
        if self.norm is not None:
            h = self.norm(h)
        return (self.dropout(self.up(self.activation(self.down(h)))) * self.scaling).to(x.dtype)


class BottleneckAdapter(Method):
    """Bottleneck adapters attached to a model by hooks on its sub-layers."""

    kind: ClassVar[str] = "bottleneck"

    def __init__(self, model: PreTrainedModel, config: BottleneckConfig, *, generator: torch.Generator) -> None:
        hidden_size = int(model.config.hidden_size)
        self.config = config.resolved(hidden_size)
        trunk: Any = model.base_model
        self._layers = trunk.layers
        self._adapters: dict[str, Bottleneck] = {}
        self._hooks: list[Any] = []
        self._residual: dict[int, Tensor] = {}
        with seeded(generator):
            for place in self.config.places(len(self._layers)):
                layer, _, name = place.partition(".")
                self._place(int(layer), name, Bottleneck(self.config, hidden_size))

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{PREFIX}{place}.{name}": parameter
            for place, adapter in self._adapters.items()
            for name, parameter in adapter.named_parameters()
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
        for hook in self._hooks:
            hook.remove()
        for place in self._adapters:
            layer, _, name = place.partition(".")
            delattr(self._layers[int(layer)], name)

    def _place(self, index: int, name: str, adapter: Bottleneck) -> None:
        layer = self._layers[index]
        device = layer.post_attention_layernorm.weight.device
        layer.add_module(name, adapter.to(device).train(layer.training))
        self._adapters[f"{index}.{name}"] = adapter
        if name == "attn_adapter":
            self._hooks.append(layer.self_attn.register_forward_hook(_after_attention(adapter)))
            return
        if self.config.variant != "houlsby":

            def remember(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                self._residual[index] = args[0]

            self._hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(remember))
        self._hooks.append(layer.mlp.register_forward_hook(self._after_mlp(index, adapter)))

    def _after_mlp(self, index: int, adapter: Bottleneck) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self.config.variant == "houlsby":
                return output + adapter(output)
            residual = self._residual.pop(index)
            return output + adapter(residual if self.config.variant == "parallel" else residual + output)

        return hook


def _after_attention(adapter: Bottleneck) -> Any:
    def hook(_: nn.Module, args: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        attention, weights = output
        return attention + adapter(attention), weights

    return hook
