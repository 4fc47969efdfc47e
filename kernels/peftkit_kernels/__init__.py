"""Pure functions on tensors: what a paged decoder with adapters computes. Knows nothing of models or servers.

Each operation checks its arguments (ValueError names the tensor, what it is and what was wanted) and runs the fastest
implementation for its device; `reference.py` and `grouped.py` say what it computes. Importing this package never
imports triton.
"""

from peftkit_kernels import checks, grouped, reference
from peftkit_kernels.dispatch import compiled_together, dispatched
from peftkit_kernels.grouped import BOTTLENECK_INPUTS, NON_LINEARITIES
from peftkit_kernels.reference import pack_linear
from peftkit_kernels.segments import MAX_RANK, Segments, max_width, sort_by_slot
from peftkit_kernels.training import (
    add_rms_norm_grad,
    cross_entropy,
    cross_entropy_grad,
    gated_grad,
    gated_joined_grad,
    nf4_dequantize_joined,
    rms_norm_beside_grad,
    rms_norm_grad,
    rotate_grad,
    rotate_joined_grad,
)

embedding = dispatched(checks.embedding)(reference.embedding)
linear = dispatched(checks.linear)(reference.linear)
rms_norm = dispatched(checks.rms_norm)(reference.rms_norm)
rope_write_kv = dispatched(checks.rope_write_kv)(reference.rope_write_kv)
paged_attention = dispatched(checks.paged_attention)(reference.paged_attention)
silu_and_mul = dispatched(checks.gated_activation)(reference.silu_and_mul)
gelu_tanh_and_mul = dispatched(checks.gated_activation)(reference.gelu_tanh_and_mul)
grouped_lora = dispatched(checks.grouped_lora)(grouped.grouped_lora)
grouped_bottleneck = dispatched(checks.grouped_bottleneck)(grouped.grouped_bottleneck)
nf4_dequantize = dispatched(checks.nf4_dequantize)(reference.nf4_dequantize)
nf4_linear = dispatched(checks.nf4_linear)(reference.nf4_linear)
copy_pages = dispatched(checks.copy_pages)(reference.copy_pages)
sample = dispatched(checks.sample)(reference.sample)

__all__ = [
    "embedding",
    "linear",
    "pack_linear",
    "rms_norm",
    "rope_write_kv",
    "paged_attention",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "grouped_lora",
    "grouped_bottleneck",
    "nf4_dequantize",
    "nf4_dequantize_joined",
    "nf4_linear",
    "copy_pages",
    "sample",
    "rms_norm_grad",
    "rms_norm_beside_grad",
    "add_rms_norm_grad",
    "rotate_grad",
    "rotate_joined_grad",
    "gated_grad",
    "gated_joined_grad",
    "cross_entropy",
    "cross_entropy_grad",
    "BOTTLENECK_INPUTS",
    "MAX_RANK",
    "NON_LINEARITIES",
    "Segments",
    "compiled_together",
    "max_width",
    "sort_by_slot",
]
