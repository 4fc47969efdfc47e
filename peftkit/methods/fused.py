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

`fuse` installs them and says once what is left out; `fast_share` is the share of a model that is in. The output head
counts among it where the loss takes it for a matrix (`peftkit.train.loss`), attention where it goes by bounds.
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

from peftkit.methods.attention import why_masked
from peftkit.methods.lora_group import Copies, Projection
from peftkit.methods.lora_layers import Adapted, LoraLinear, WholeModule
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
    """Gives the modules of `model` the forwards of this file, and logs what is left out, and why."""
    copies = Copies()
    for module in model.modules():
        forward = _forward(module)
        if forward is not None:
            module.__dict__["forward"] = MethodType(forward, module)
            module.__dict__[_LINEARS] = _Linears(copies)
        elif isinstance(module, LoraLinear):
            module.fused, module.copies = True, copies
    model.__dict__[_COPIES] = copies
    left = [
        f"{count} of {len(reasons)} {kind} ({reason})"
        for kind, reasons in _reasons(model).items()
        for reason, count in Counter(reasons).items()
        if reason is not None
    ]
    if left:
        logger.info("off the fast path: %s", ", ".join(left))


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


def fast_share(model: PreTrainedModel, longest: int = 0) -> float | None:
    """Share of the linear layers, norms, gates and attentions of a decoder, and of its output head, that are on the
    fast path, each counted as one; None for a model that isn't fused.

    Attention is on it where sequences of `longest` tokens go by their bounds.
    """
    if _COPIES not in model.__dict__:
        return None
    reasons = _reasons(model)
    masked = why_masked(model, longest)
    reasons["attentions"] = [reason or masked for reason in reasons["attentions"]]
    every = [reason for each in reasons.values() for reason in each]
    return every.count(None) / max(len(every), 1)


def why_no_matrix(head: nn.Module, dtype: torch.dtype) -> str | None:
    """What keeps the loss from taking an output head for a frozen matrix on inputs of a dtype, if anything does."""
    if isinstance(head, WholeModule):
        return "trained whole"
    if isinstance(head, Adapted):
        return "adapted"
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return f"of {type(head).__name__}"
    if "forward" in vars(head):
        return "whose forward is replaced"
    return "with a bias" if head.bias is not None else why_not(head, dtype)


def _reasons(model: PreTrainedModel) -> dict[str, list[str | None]]:
    """Kind of module → of each: what keeps it off the fast path, or None; of attention but for `why_masked`."""
    trunk: Any = model.base_model
    head = model.get_output_embeddings()
    dtype, linears, norms = model.dtype, list[str | None](), list[str | None]()
    gate = None if model.config.hidden_act in _ACTIVATIONS else f"of {model.config.hidden_act}"
    for layer in trunk.layers:
        linears += [
            _why_not(linear, block, dtype)
            for block in (layer.self_attn, layer.mlp)
            for linear in block.children()
            if isinstance(linear, nn.Linear | Adapted)
        ]
        # a layer with its own forward adds residuals in passes of their own
        own, of_heads = _unfused(layer), [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        norms += [own or _why_not_norm(norm, dtype) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        norms += [_why_not_norm(norm, dtype) for norm in of_heads if norm is not None]
    return {
        "linear layers": linears,
        "norms": [*norms, _why_not_norm(trunk.norm, dtype)],
        "gates": [_unfused(layer.mlp) or gate for layer in trunk.layers],
        "attentions": [_unfused(layer.self_attn) for layer in trunk.layers],
        "output heads": [] if head is None else [why_no_matrix(head, dtype)],
    }


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
    if _why_not_norm(before, hidden_states.dtype) is None:
        normed, residual = rms_norm_beside_grad(hidden_states, before.weight, before.variance_epsilon)
    else:
        normed, residual = before(hidden_states), hidden_states
    attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    if _why_not_norm(after, attended.dtype) is None:
        normed, residual = add_rms_norm_grad(attended, residual, after.weight, after.variance_epsilon)
    else:
        residual = residual + attended
        normed = after(residual)
    return residual + self.mlp(normed)


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


def _why_not(layer: nn.Module, block: nn.Module, dtype: torch.dtype) -> str | None:
    """What keeps a linear layer of a block from being part of a step of autograd, if anything does."""
    if isinstance(layer, WholeModule):
        return "trained whole"
    if not isinstance(layer, LoraLinear):
        return _unfused(block) or why_not(layer, dtype)
    if not layer.fused:
        return f"in {type(block).__name__}"
    return "with a hook" if has_hooks(layer) else why_not(layer.base_layer, dtype)


def _unfused(module: nn.Module) -> str | None:
    """The class of a module that keeps its own forward, as the reason of what is in it."""
    return None if _is_fused(module) else f"in {type(module).__name__}"


def _why_not_norm(norm: Any, dtype: torch.dtype) -> str | None:
    """What keeps a norm from doing what `_norm` does on inputs of a dtype, with a residual too, if anything does."""
    if isinstance(norm, WholeModule):
        return "trained whole"
    if getattr(norm.__dict__.get("forward"), "__func__", None) is not _norm:
        return f"of {type(norm).__name__}"
    if has_hooks(norm):
        return "with a hook"
    weight_H = norm._parameters["weight"]
    if weight_H.requires_grad:
        return "trained whole"
    return None if weight_H.dtype == dtype else f"that compute in {str(weight_H.dtype).removeprefix('torch.')}"
