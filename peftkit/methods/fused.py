"""Forwards for training of the layers of known decoders, and of their attention, feed-forward and norm modules.

    layer           norms with the residuals that are added before them and go on beside them, one pass each way
    norm            rms_norm_grad, one pass
    attention       q, k, v in one step of autograd and one tensor (`lora_linear.py`), rotated in one pass in place, the
                    attention function that the model is set to, o
    feed-forward    gate, up in one step and one tensor, activation(gate) * up in one pass whose backward writes over
                    them, down

They stand in the modules' places as `forward` of each. So hooks on them hold, and so do the modules that adapters put
in the place of projections: what isn't a frozen linear layer, or LoRA on one, is called as it is. Modules of other
classes keep their own forward, and so does attention that is called with a cache.

`fuse` installs them and says once what is left out; `fast_share` is the share of a model's decoder that is in.
`holding` says when nothing that is trained changes, so that what products take of it is made once.
"""

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peftkit.methods.bottleneck import Bottleneck
from peftkit.methods.lora_group import Copies, Projection
from peftkit.methods.lora_layers import Adapted, LoraLinear
from peftkit.methods.lora_linear import fits, frozen_projection, has_hooks, project, project_joined, why_not
from peftkit_kernels import (
    add_rms_norm_grad,
    gated_grad,
    gated_joined_grad,
    rms_norm_beside_grad,
    rms_norm_grad,
    rotate_grad,
    rotate_joined_grad,
)

logger = logging.getLogger(__name__)

_ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""A config's `hidden_act` → the activation of `gated_grad`."""


_COPIES, _LINEARS = "peftkit_copies", "peftkit_linears"
"""Attributes of a model and of its fused modules."""


def fuse(model: PreTrainedModel) -> None:
    """Gives the modules of `model` the forwards of this file, and logs which linear layers are left out, and why."""
    copies = Copies()
    for module in model.modules():
        forward = _forward(module)
        if forward is not None:
            module.__dict__["forward"] = MethodType(forward, module)
            module.__dict__[_LINEARS] = _Linears(copies)
        elif isinstance(module, LoraLinear):
            module.fused, module.copies = True, copies
    model.__dict__[_COPIES] = copies
    reasons = _reasons(model)
    left = Counter(reason for reason in reasons if reason is not None)
    if left:
        kinds = ", ".join(f"{count} {reason}" for reason, count in left.items())
        logger.info("%d of the decoder's %d linear layers run as they are: %s", left.total(), len(reasons), kinds)


def unfuse(model: PreTrainedModel) -> None:
    """Gives the modules their own forwards back."""
    model.__dict__.pop(_COPIES, None)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.fused, module.copies = False, None
        elif _is_fused(module):
            del module.__dict__["forward"], module.__dict__[_LINEARS]


def holding(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, nothing that is trained may change: passes over the model share what they make of it."""
    copies = model.__dict__.get(_COPIES)
    return nullcontext() if copies is None else copies.hold()


def fast_share(model: PreTrainedModel) -> float:
    """Share of the linear layers of a model's decoder that run as steps of autograd of their own, from 0 to 1."""
    reasons = _reasons(model)
    return reasons.count(None) / max(len(reasons), 1)


def _reasons(model: PreTrainedModel) -> list[str | None]:
    """Of each linear layer of the decoder: what keeps it off the fast path, or None."""
    trunk: Any = model.base_model
    found: list[str | None] = []
    for layer in trunk.layers:
        for block in layer.children():
            inner = [] if isinstance(block, Bottleneck) else block.children()
            for linear in inner:
                if isinstance(linear, nn.Linear | Adapted):
                    fused = linear.fused if isinstance(linear, LoraLinear) else _is_fused(block)
                    reason = _why_not(linear, layer.input_layernorm.weight.dtype)
                    found.append(reason if fused else f"in {type(block).__name__}")
    return found


def _forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of this file for a module that has its class's own, which it must be made for."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models.") or "forward" in module.__dict__:
        return None
    if issubclass(kind, GradientCheckpointingLayer) and kind.__call__ is not nn.Module.__call__:
        return None  # a release in which computing again isn't part of the forward
    for end, forward in _FORWARDS.items():
        if kind.__name__ in {name + end for name in _ARCHITECTURES}:
            taken = list(inspect.signature(kind.forward).parameters)
            return forward if taken == list(inspect.signature(forward).parameters) else None
    return None


def _is_fused(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) in _FORWARDS.values()


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Linear layers of a module that share an input."""

    layers: Sequence[nn.Module]
    projections: Sequence[Projection | None]
    """Of those that can be a step of autograd."""
    whole: Sequence[Projection] | None
    """The projections, if none is missing."""
    is_owned: bool
    """Whether nobody keeps what they give: DoRA does, and what another forward does isn't known."""

    def joined(self, x: Tensor) -> Tensor | None:
        """Their outputs side by side, if they are one step."""
        return None if self.whole is None else project_joined(x, self.whole)

    def apart(self, x: Tensor) -> list[Tensor]:
        """Their outputs, of those that can by one step of autograd."""
        grouped = [one for one in self.projections if one is not None]
        outputs = iter(project(x, grouped) if grouped else ())
        pairs = zip(self.layers, self.projections, strict=True)
        return [layer(x) if one is None else next(outputs) for layer, one in pairs]


class _Linears:
    """The blocks of a module, which are looked up once while copies are held: nothing else changes meanwhile either."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        # with the module, not in a table of all layers: they hold weights, which hold their layer where they are NF4
        self._frozen: dict[str, Projection] = {}
        self._known: dict[tuple[str, ...], tuple[int, torch.dtype, _Block]] = {}

    def of(self, module: Any, names: tuple[str, ...], x: Tensor) -> _Block:
        """The block of layers of these names for an input."""
        held = self._copies.are_held and torch.is_grad_enabled()
        known = self._known.get(names) if held else None
        if known is not None and known[0] == self._copies.round and known[1] == x.dtype:
            return known[2]
        layers = [getattr(module, name) for name in names]
        projections = [self._projection(name, layer, x) for name, layer in zip(names, layers, strict=True)]
        whole = [one for one in projections if one is not None]
        is_owned = len(whole) == len(layers) and not any([one.is_dora for one in whole])
        block = _Block(layers, projections, whole if len(whole) == len(layers) else None, is_owned)
        if held:
            self._known[names] = self._copies.round, x.dtype, block
        return block

    def _projection(self, name: str, layer: nn.Module, x: Tensor) -> Projection | None:
        if isinstance(layer, LoraLinear):
            return layer.projection() if not has_hooks(layer) and fits(layer.base_layer, x) else None
        if not isinstance(layer, nn.Linear) or not fits(layer, x):
            return None
        known = self._frozen[name] = frozen_projection(layer, self._frozen.get(name))
        return known


def _layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    kwargs |= {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "use_cache": use_cache,
        "position_embeddings": position_embeddings,
    }
    if past_key_values is not None or use_cache:
        return type(self).forward(self, hidden_states, **kwargs)
    if self.gradient_checkpointing and self.training:  # which is part of the forward that this one stands for
        return self._gradient_checkpointing_func(partial(_blocks, self, **kwargs), hidden_states)
    return _blocks(self, hidden_states, **kwargs)


def _blocks(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    before, after = self.input_layernorm, self.post_attention_layernorm
    if _is_plain(before, hidden_states):
        normed, residual = rms_norm_beside_grad(hidden_states, before.weight, before.variance_epsilon)
    else:
        normed, residual = before(hidden_states), hidden_states
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    if _is_plain(after, attended):
        normed, residual = add_rms_norm_grad(attended, residual, after.weight, after.variance_epsilon)
    else:
        residual = residual + attended
        normed = after(residual)
    return residual + self.mlp(normed)


def _is_plain(norm: Any, x: Tensor) -> bool:
    """Whether a norm's own module does what `_norm` does, and nobody looks at its calls."""
    forward = getattr(norm.__dict__.get("forward"), "__func__", None)
    if forward is not _norm or has_hooks(norm):
        return False
    weight_H = norm._parameters["weight"]
    return not weight_H.requires_grad and weight_H.dtype == x.dtype


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    weight_H = self.weight
    if weight_H.requires_grad or weight_H.dtype != hidden_states.dtype:
        return type(self).forward(self, hidden_states)
    return rms_norm_grad(hidden_states, weight_H, self.variance_epsilon)


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if past_key_values is not None:
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **kwargs
        )
    B, T = hidden_states.shape[:2]
    cos_ND, sin_ND = [(x if len(x) == B else x.expand(B, T, -1)).reshape(B * T, -1) for x in position_embeddings]
    linears: _Linears = self.__dict__[_LINEARS]
    block = linears.of(self, ("q_proj", "k_proj", "v_proj"), hidden_states)
    has_norms = "q_norm" in self._modules
    qkv = None if has_norms else block.joined(hidden_states)
    if qkv is not None and block.whole is not None:
        num_keys = block.whole[1].outputs // self.head_dim
        heads = rotate_joined_grad(qkv, cos_ND, sin_ND, num_keys, overwrite=block.is_owned)
    else:
        q, k, v = block.apart(hidden_states)
        q_NQD, k_NKD = (x.reshape(B * T, -1, self.head_dim) for x in (q, k))
        if has_norms:
            q_NQD, k_NKD = self.q_norm(q_NQD), self.k_norm(k_NKD)
        rotated = (*rotate_grad(q_NQD, k_NKD, cos_ND, sin_ND), v)
        heads = [x.reshape(B, T, -1, self.head_dim).transpose(1, 2) for x in rotated]
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, sys.modules[type(self).__module__].eager_attention_forward
    )
    output, weights = attend(
        self,
        *heads,
        attention_mask,
        dropout=self.attention_dropout if self.training else 0.0,
        scaling=self.scaling,
        **_window(self),
        **kwargs,
    )
    output = output.reshape(B, T, -1)
    return linears.of(self, ("o_proj",), output).apart(output)[0], weights


def _window(attention: Any) -> dict[str, int | None]:
    """What the classes tell the attention function of a sliding window."""
    if type(attention).__name__ == "LlamaAttention":
        return {}
    if type(attention).__name__ == "MistralAttention":
        return {"sliding_window": getattr(attention.config, "sliding_window", None)}
    return {"sliding_window": attention.sliding_window}


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    linears: _Linears = self.__dict__[_LINEARS]
    block = linears.of(self, ("gate_proj", "up_proj"), x)
    activation = _ACTIVATIONS.get(self.config.hidden_act)
    both = None if activation is None else block.joined(x)
    if activation is not None and both is not None:
        h = gated_joined_grad(both, activation, overwrite=block.is_owned)
    else:
        gate, up = block.apart(x)
        h = self.act_fn(gate) * up if activation is None else gated_grad(gate, up, activation)
    return linears.of(self, ("down_proj",), h).apart(h)[0]


_FORWARDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"DecoderLayer": _layer, "Attention": _attention, "MLP": _feed_forward, "RMSNorm": _norm}
)
"""End of a class's name → the forward in the place of its own."""


def _why_not(layer: nn.Module, dtype: torch.dtype) -> str | None:
    if not isinstance(layer, LoraLinear):
        return why_not(layer, dtype)
    return "with a hook" if has_hooks(layer) else why_not(layer.base_layer, dtype)
