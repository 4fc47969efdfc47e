"""What a step needs in memory, by part, from shapes alone. Formulas and what they leave out:

    weights      bytes of the base as it is held (4-bit codes and scales where it is quantised)
    adapter      4 bytes of weight and 4 of gradient for each trainable parameter
    optimizer    8 bytes for each trainable parameter: AdamW's two float32 moments, or 2 for 8-bit ones
    activations  tokens · b · (L · layer + H), what backward keeps, b bytes a value; with gradient checkpointing
                 tokens · b · (L · H + layer), a layer's input each and one layer recomputed
        layer = 4H + 4·Q·D + 4I: residuals and normed inputs (2 + 2) H; queries, keys and values spread to Q heads and
                the attention's output, 4·Q·D; gate, up, their activation and product, 4 I
    logits       targets of a chunk · V · 12 bytes: logits, their gradient and softmax in float32

Tokens are those of the largest padded micro-batch. Left out: the allocator's slack, a dequantised matrix at a time
over a 4-bit base, and the libraries themselves (about 0.6 GB of an ordinary process).
L layers, H hidden, Q query heads, D head size, I feed-forward, V vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from peftkit.train.loss import chunk_rows


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of each part while training."""

    weights: int
    adapter: int
    optimizer: int
    activations: int
    logits: int

    def parts(self) -> dict[str, int]:
        """Name of each part → bytes."""
        return asdict(self)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts().values())


def estimate_memory(
    model: PreTrainedModel,
    *,
    batch_shapes: Sequence[tuple[int, int, int]],
    virtual_tokens: int,
    gradient_checkpointing: bool,
    moments_8bit: bool = False,
) -> MemoryEstimate:
    """The estimate for micro-batches of the given (rows, padded length, target tokens) on a model with its adapter."""
    config = model.config
    trainable = num_trainable(model)
    tokens = max(rows * (length + virtual_tokens) for rows, length, _ in batch_shapes)
    targets = min(max(target for *_, target in batch_shapes), chunk_rows(config.vocab_size))
    layer = _layer_values(config)
    if gradient_checkpointing:
        values = config.num_hidden_layers * config.hidden_size + layer
    else:
        values = config.num_hidden_layers * layer + config.hidden_size
    return MemoryEstimate(
        weights=weight_bytes(model),
        adapter=8 * trainable,
        optimizer=(2 if moments_8bit else 8) * trainable,
        activations=tokens * values * model.get_input_embeddings().weight.element_size(),  # type: ignore[operator]
        logits=targets * config.vocab_size * 12,
    )


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: allocated on the GPU, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, where only a GPU's peak is known

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def num_trainable(model: PreTrainedModel) -> int:
    """Trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def num_base(model: PreTrainedModel) -> int:
    """Parameters of the frozen base; a 4-bit weight counts by its shape, not by its packed bytes."""
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
            total += shape.numel()
    return total


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the frozen weights as they are held, with a quantised weight's scales; a tied weight counts once."""
    total = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        total += parameter.numel() * parameter.element_size()
        total += _scale_bytes(getattr(parameter, "quant_state", None))
    return total + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def _scale_bytes(quant_state: object) -> int:
    """Bytes of bitsandbytes' scales beside a 4-bit weight, those of a double quantisation among them."""
    total = 0
    for name in ("absmax", "offset"):
        tensor = getattr(quant_state, name, None)
        total += tensor.numel() * tensor.element_size() if tensor is not None else 0
    nested = getattr(quant_state, "state2", None)
    return total + (_scale_bytes(nested) if nested is not None else 0)


def _layer_values(config: PretrainedConfig) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4 * config.hidden_size + 4 * config.num_attention_heads * head_dim + 4 * config.intermediate_size
