"""Bases with random weights for `peftkit bench train`, made where they are needed, a matrix at a time."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftkit.base import BaseInfo, Quant
from peftkit.base.load import compute_as_asked
from peftkit.methods.method import replace_module

SHAPES = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151936,
    },
    "small": {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096,
    },
    "toy": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    },
}  # fmt: skip
"""Sizes of a Llama: Llama-3.1-8B's, Qwen2.5-1.5B's, and two for tests."""

_DEVIATION = 0.02
_MAX_POSITIONS = 1 << 20


def random_base(
    shape: str, quant: Quant, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> PreTrainedModel:
    """A frozen Llama whose linear layers are NF4 with double quantisation, or of `dtype` as all the rest is.

    A layer's weight in 16 bits is there only while it is quantised, so the largest part beyond the model itself is one
    matrix.
    """
    sizes: dict[str, Any] = {**SHAPES[shape], "max_position_embeddings": _MAX_POSITIONS, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.to(dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(parameter: Tensor) -> Tensor:
        values = torch.empty(parameter.shape, dtype=dtype, device=device)
        return values.fill_(1) if values.dim() == 1 else values.normal_(0.0, _DEVIATION, generator=generator)

    for path, module in list(model.named_modules()):
        if quant == "nf4" and isinstance(module, nn.Linear) and path != "lm_head":
            replace_module(model, path, _nf4(drawn(module.weight), dtype))
        else:
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(drawn(parameter), requires_grad=False))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # whose frequencies are float32 buffers
    compute_as_asked(model)
    model.eval()
    model.__dict__["peftkit_base"] = BaseInfo(shape, Path(shape))
    model.__dict__["peftkit_quant"] = quant
    return model


def _nf4(weight: Tensor, dtype: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    out_features, in_features = weight.shape
    linear = Linear4bit(in_features, out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta")
    quantised: Any = Params4bit
    params = quantised(weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=linear)
    linear.weight = params.to(weight.device)
    return linear


def matrix_parameters(shape: str) -> int:
    """Parameters that a token is multiplied by: all matrices but the input embedding."""
    sizes = SHAPES[shape]
    hidden, inner, width = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    attention = 2 * hidden * width * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
    return sizes["num_hidden_layers"] * (attention + 3 * hidden * inner) + sizes["vocab_size"] * hidden


def attention_flops(shape: str, length: int) -> float:
    """Operations of causal attention a token, forward: q kᵀ and p v over half of a sequence of `length`."""
    sizes = SHAPES[shape]
    return 2.0 * length * sizes["num_attention_heads"] * sizes["head_dim"] * sizes["num_hidden_layers"]
