"""Prefix tuning (Li and Liang 2021, arXiv:2101.00190) and P-tuning v2 (Liu et al. 2022, arXiv:2110.07602).

Every layer l has V virtual keys and values in front of the text's, which every query sees:

    softmax(q [K_l ; k]ᵀ / √D) [V_l ; v]        K_l, V_l (n_kv, V, D)

Keys stand as stored, after the place where rotary positions are applied; the text's positions start at V. P-tuning v2
trains the table P (V, L·2·n_kv·D) directly; prefix tuning trains it through a two-layer network,

    P = P₀ + W₂ tanh(W₁ E + b₁) + b₂            E (V, n_kv·D), W₁ (h, n_kv·D), W₂ (L·2·n_kv·D, h)

and exports the table. Read as (V, 2·L, n_kv, D), row 2l of the second axis holds K_l and row 2l+1 V_l, as in HF PEFT.
The start P₀ is the base's own keys and values of a text (`init: text`) or of tokens drawn from the vocabulary, so that
step 0 equals the base with that text in front; W₂ and b₂ are then zero.

Keys and values are put in inside the attention call and not through a cache, so that gradient checkpointing works and
a cache holds the text alone.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from peftkit.errors import UnsupportedError
from peftkit.methods.attention import ATTENTION as BY_BOUNDS
from peftkit.methods.attention import InFront, over_sequences
from peftkit.methods.method import (
    MAX_ENCODER,
    Method,
    StartsFromText,
    exported,
    initial_token_ids,
    input_embedding,
    seeded,
    text_positions,
)
from peftkit.methods.soft_prompt import KEY

ATTENTION = "peftkit_prefix"
NOISE = 0.02
"""Standard deviation of `init: random`; one of 1 starts at several times the base's loss."""


def kv_width(config: PretrainedConfig) -> int:
    """n_kv · D: the width of one layer's keys for one token."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_key_value_heads * head_dim)


class _PrefixSettings(StartsFromText):
    init: Literal["text", "vocab", "random", "zero"] = "vocab"
    """Start from the base's keys and values of a text or of tokens drawn from the vocabulary, from noise, or zero."""

    def identity(self) -> dict[str, Any]:
        # the exported table is all that counts: both kinds compute the same of it
        return {"kind": "prefix", "num_virtual_tokens": self.num_virtual_tokens}


class PrefixTuningConfig(_PrefixSettings):
    """Settings of prefix tuning with its reparameterisation."""

    kind: Literal["prefix"] = "prefix"
    encoder_hidden_size: int | None = Field(default=None, ge=1, le=MAX_ENCODER)
    """Width h of the reparameterising network; null is the model's hidden size."""


class PTuningV2Config(_PrefixSettings):
    """Settings of P-tuning v2."""

    kind: Literal["ptuning_v2"] = "ptuning_v2"


class PrefixTable(nn.Module):
    """Holds P (V, L·2·n_kv·D)."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.prompt_embeddings = nn.Parameter(start)

    def forward(self) -> Tensor:
        return self.prompt_embeddings


class PrefixNetwork(nn.Module):
    """P₀ + W₂ tanh(W₁ E + b₁) + b₂, the shape of HF PEFT's prefix encoder. `start` P₀ is constant."""

    def __init__(self, start: Tensor, token_dim: int, hidden_size: int, from_start: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(start.shape[0], token_dim)
        output = nn.Linear(hidden_size, start.shape[1])
        if from_start:
            nn.init.zeros_(output.weight)
            nn.init.zeros_(output.bias)
        self.transform = nn.Sequential(nn.Linear(token_dim, hidden_size), nn.Tanh(), output)
        self.start: Tensor
        self.register_buffer("start", start)

    def forward(self) -> Tensor:
        return self.start + self.transform(self.embedding.weight)


class Prefix(Method):
    """Prefix tuning or P-tuning v2 attached to a model."""

    kind: ClassVar[str] = "prefix"

    def __init__(
        self,
        model: PreTrainedModel,
        config: PrefixTuningConfig | PTuningV2Config,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        generator: torch.Generator,
    ) -> None:
        settings = model.config
        if settings._attn_implementation not in ("sdpa", "eager", BY_BOUNDS):
            raise UnsupportedError(
                f"{config.kind} needs attention 'sdpa' or 'eager', the model uses '{settings._attn_implementation}'"
            )
        self.config = config
        self.kind = config.kind  # type: ignore[misc]
        self._model = model
        embedding = input_embedding(model)
        self._device = embedding.weight.device
        K = settings.num_key_value_heads
        self._view = (config.num_virtual_tokens, settings.num_hidden_layers, 2, K, kv_width(settings) // K)
        start = self._start(tokenizer, generator)
        self._encoder: nn.Module = self._build(start, generator).to(start.device)
        model.add_module("prefix_encoder", self._encoder)
        self._kv_L2KVD: Tensor | None = None
        self.in_front: InFront | None = None
        """Where the virtual tokens of a forward pass go whose rows are known by the bounds of their sequences."""
        self._attention_before = settings._attn_implementation
        settings._attn_implementation = ATTENTION
        trunk: Any = model.base_model
        self._hook = trunk.register_forward_pre_hook(self._prepare, with_kwargs=True)
        for layer in trunk.layers:
            layer.self_attn.__dict__["prefix"] = self

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._encoder.named_parameters())

    def export(self) -> dict[str, Tensor]:
        return {KEY: exported(self._encoder())}

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {KEY: (self._view[0], math.prod(self._view[1:]))}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the exported table; a reparameterising network is given up for it."""
        self._encoder = PrefixTable(tensors[KEY].to(self._device, torch.float32, copy=True))
        self._model.add_module("prefix_encoder", self._encoder)

    def detach(self) -> None:
        self._hook.remove()
        self._model.config._attn_implementation = self._attention_before
        trunk: Any = self._model.base_model
        for layer in trunk.layers:
            del layer.self_attn.__dict__["prefix"]
        del self._model.prefix_encoder

    def layer(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Virtual keys and values of one layer, each (1, n_kv, V, D)."""
        assert self._kv_L2KVD is not None
        key, value = self._kv_L2KVD[index].to(dtype)
        return key[None], value[None]

    def _build(self, start: Tensor, generator: torch.Generator) -> nn.Module:
        if not isinstance(self.config, PrefixTuningConfig):
            return PrefixTable(start)
        token_dim = math.prod(self._view[3:])
        with seeded(generator):
            width = self.config.encoder_hidden_size or self._model.config.hidden_size
            return PrefixNetwork(start, token_dim, width, from_start=self.config.init != "random")

    def _start(self, tokenizer: PreTrainedTokenizerBase | None, generator: torch.Generator) -> Tensor:
        """P₀: float32 (V, L·2·n_kv·D)."""
        V, width, device = self._view[0], math.prod(self._view[1:]), self._device
        direct = not isinstance(self.config, PrefixTuningConfig)
        if self.config.init == "random" and direct:
            return torch.randn(V, width, generator=generator).to(device) * NOISE
        if self.config.init in ("zero", "random"):
            return torch.zeros(V, width, device=device)
        vocabulary = self._model.config.vocab_size
        ids = initial_token_ids(self.config.init_text, V, vocabulary, tokenizer, generator).to(device)
        training = self._model.training
        with torch.no_grad():
            cache: Any = DynamicCache()  # made without the model's config it keeps what has left an attention window
            self._model.eval()(input_ids=ids[None], past_key_values=cache, use_cache=True)
        self._model.train(training)
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        return torch.stack(layers).permute(3, 0, 1, 2, 4).reshape(V, -1).float()

    def _prepare(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Computes the virtual keys and values of this forward pass and starts the text's positions at V."""
        if args:
            kwargs["input_ids"], *rest = args
            assert not rest, "a trunk is called with keywords beyond input_ids"
        text = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        B, T = text.shape[:2]
        cache = kwargs.get("past_key_values")
        mask = kwargs.get("attention_mask")
        if mask is None:
            mask = torch.ones(B, T + (0 if cache is None else cache.get_seq_length()), device=text.device)
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            raise UnsupportedError(
                f"{self.kind} needs an attention mask (batch, length) or booleans (batch, 1, length, length)"
            )
        kwargs["position_ids"] = text_positions(kwargs.get("position_ids"), mask, T) + self._view[0]
        self._kv_L2KVD = self._encoder().view(self._view).permute(1, 2, 3, 0, 4)
        bounds = kwargs.get("cu_seq_lens_q")
        self.in_front = None if bounds is None else InFront(bounds, self._view[0], B * T)
        return (), kwargs


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention of query (B, Q, Tq, D) over the layer's prefix and key, value (B, n_kv, Tk, D)."""
    prefix: Prefix = module.__dict__["prefix"]
    (B, _, Tq, _), Tk = query.shape, key.shape[2]
    prefix_key, prefix_value = prefix.layer(module.__dict__["layer_idx"], key.dtype)
    if prefix.in_front is not None:
        text = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        output_NQD = _over_bounds(prefix.in_front, prefix_key[0], prefix_value[0], *text, **kwargs)
        return output_NQD.view(B, Tq, *output_NQD.shape[1:]), None
    if attention_mask is None and Tq > 1:
        visible = torch.ones(Tq, Tk, dtype=torch.bool, device=query.device).tril(Tk - Tq)
        attention_mask = visible[None, None].expand(B, 1, Tq, Tk)
    if attention_mask is not None:
        seen = attention_mask.new_ones(*attention_mask.shape[:3], prefix_key.shape[2])
        attention_mask = torch.cat([seen, attention_mask], -1)
    key = torch.cat([prefix_key.expand(B, -1, -1, -1), key], 2)
    value = torch.cat([prefix_value.expand(B, -1, -1, -1), value], 2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _over_bounds(
    in_front: InFront,
    prefix_key_KVD: Tensor,
    prefix_value_KVD: Tensor,
    query_NQD: Tensor,
    key_NKD: Tensor,
    value_NKD: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """The same over rows without a mask: (N, Q, D)."""
    keys = in_front.put(prefix_key_KVD.transpose(0, 1), key_NKD)
    values = in_front.put(prefix_value_KVD.transpose(0, 1), value_NKD)
    longest = max_length_q + prefix_key_KVD.shape[1]
    return over_sequences(query_NQD, keys, values, cu_seq_lens_q, in_front.bounds_S, max_length_q, longest, scaling)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
