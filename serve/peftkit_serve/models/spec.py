"""What a decoder of the Llama, Mistral, Qwen2 or Qwen3 family is made of, read from config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from peftkit.base import ARCHITECTURES
from peftkit.base.folder import holds_nf4, read_json
from peftkit.errors import BaseModelError

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linear layers of a decoder layer, in the order of every table over projections."""

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""The two ends of a decoder: the input embedding and the output embedding."""

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SCALED_ROPE = ("linear", "llama3", "yarn")  # the kinds whose frequencies don't change with the length of a sequence


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder. All sizes are of the whole model; nothing here depends on a device or dtype."""

    architecture: str
    """As config.json names it, for example LlamaForCausalLM."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """Most positions of a sequence, virtual tokens included."""
    norm_eps: float
    activation: Activation
    inv_freq: tuple[float, ...]
    """Rotary frequencies, radians a position; half as many as `head_dim`."""
    rope_magnitude: float
    """Factor on sine and cosine; 1 but for yarn."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in positions, the query's own included; None sees everything."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised by head before they are rotated."""
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    holds_nf4: bool = False
    """Whether bitsandbytes has quantised the folder's linear layers to NF4 already."""

    @property
    def projection_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each of `PROJECTIONS`."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, wide = self.hidden_size, self.intermediate_size
        return ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (wide, hidden), (wide, hidden), (hidden, wide))

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one position's keys and values in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_spec(path: Path) -> ModelSpec:
    """Reads the spec of the base in a HF folder.

    Raises BaseModelError that names what isn't supported: the architecture, the activation, the kind of RoPE, a layer
    type, a quantised checkpoint.
    """
    file = path / "config.json"
    raw = read_json(file)
    model_type = str(raw.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise BaseModelError(f"{file}: model_type {model_type} can't be served; {', '.join(ARCHITECTURES)} can")
    if "quantization_config" in raw and not holds_nf4(raw):
        raise BaseModelError(
            f"{file}: the base is quantised already, and not by bitsandbytes to NF4 with double quantisation: name the "
            "full-precision base and use quant nf4"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise BaseModelError(f"{file}: {' '.join(str(error).split())}") from error
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, rope_magnitude = _rope(file, config, head_dim)
    attention_bias = bool(getattr(config, "attention_bias", False))
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if num_heads % num_kv_heads:
        raise BaseModelError(
            f"{file}: num_attention_heads is {num_heads}: a multiple of num_key_value_heads, {num_kv_heads}, is wanted"
        )
    return ModelSpec(
        architecture=ARCHITECTURES[model_type],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        activation=_activation(file, config),
        inv_freq=inv_freq,
        rope_magnitude=rope_magnitude,
        windows=_windows(file, config),
        qkv_bias=model_type == "qwen2" or (model_type in ("llama", "qwen3") and attention_bias),
        o_bias=model_type in ("llama", "qwen3") and attention_bias,
        mlp_bias=model_type == "llama" and bool(getattr(config, "mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        tied_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(path, config),
        holds_nf4=holds_nf4(raw),
    )


def _activation(file: Path, config: PretrainedConfig) -> Activation:
    if config.hidden_act not in _ACTIVATIONS:
        raise BaseModelError(f"{file}: hidden_act {config.hidden_act} can't be served; {', '.join(_ACTIVATIONS)} can")
    return _ACTIVATIONS[config.hidden_act]


def _rope(file: Path, config: PretrainedConfig, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the factor on sine and cosine."""
    parameters = cast(dict[str, Any], config.rope_parameters)
    kind = parameters.get("rope_type")
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, magnitude = 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    elif kind in _SCALED_ROPE:
        inv_freq, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    else:
        raise BaseModelError(f"{file}: rope_type {kind} can't be served; default, {', '.join(_SCALED_ROPE)} can")
    if 2 * inv_freq.numel() != head_dim or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise BaseModelError(f"{file}: partial_rotary_factor can't be served: RoPE must turn the whole head")
    return tuple(inv_freq.tolist()), float(magnitude)


def _windows(file: Path, config: PretrainedConfig) -> tuple[int | None, ...]:
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    if config.sliding_window is not None and config.sliding_window < 1:
        raise BaseModelError(f"{file}: sliding_window is {config.sliding_window}: at least 1, or null, is wanted")
    if config.model_type == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    for kind in config.layer_types:
        if kind not in windows:
            raise BaseModelError(f"{file}: layer_types has {kind}, which can't be served; {', '.join(windows)} can")
    return tuple(windows[kind] for kind in config.layer_types)


def _eos_token_ids(path: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """From generation_config.json, which knows of chat models' end of turn, else from config.json."""
    file = path / "generation_config.json"
    found = read_json(file).get("eos_token_id") if file.is_file() else None
    if found is None:
        found = config.eos_token_id
    return () if found is None else tuple(found) if isinstance(found, list) else (int(found),)
