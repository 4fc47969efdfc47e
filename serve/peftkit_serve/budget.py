"""One byte budget: what a device has beside the base's weights, and what of it adapters, steps and KV pages get.

    free memory · 0.9 = adapters + the largest step + graphs + KV pages

On a GPU the largest step and the graphs are measured, before pages are allotted; on a CPU the step is estimated.
"""

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from peftkit.errors import RunError
from peftkit_serve.adapters.packing import UNIT_BYTES
from peftkit_serve.models.spec import ModelSpec
from peftkit_serve.pages import PAGE_TOKENS

_ROOMY_RANK = 64  # by default adapter memory holds all slots at this rank on every linear layer
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Bytes of a device's memory, by what they are for."""

    weights: int
    adapters: int
    """All of adapter memory, used or not."""
    kv: int
    """All KV pages that requests can have."""
    steps: int
    """What the largest step takes beside, measured on a GPU, else estimated."""
    graphs: int
    """What captured graphs take."""

    def __str__(self) -> str:
        parts = ("weights", "adapters", "kv", "steps", "graphs")
        return ", ".join(f"{name} {getattr(self, name) / _MIB:.0f} MiB" for name in parts)


def free_bytes(device: torch.device) -> int:
    """Bytes that may be taken on a device; a part is left to the system, and on a CPU to other programs."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    return psutil.virtual_memory().available // 2


def default_adapter_bytes(spec: ModelSpec, dtype: torch.dtype, num_slots: int, budget_bytes: int) -> int:
    """Room for a LoRA of rank 64 in each slot and both embeddings, whole, of one; at most a quarter of the budget."""
    layer = _ROOMY_RANK * dtype.itemsize * sum(out + inside for out, inside in spec.projection_shapes)
    ends = 2 * _whole_units(spec.vocab_size * spec.hidden_size * dtype.itemsize)
    return min(num_slots * spec.num_layers * _whole_units(layer) + ends, budget_bytes // 4)


def estimated_step_bytes(spec: ModelSpec, dtype: torch.dtype, max_tokens: int, max_requests: int) -> int:
    """Upper estimate of a step's activations and logits."""
    widest = 3 * spec.intermediate_size + 4 * spec.hidden_size + 4 * spec.num_heads * spec.head_dim
    return max_tokens * widest * dtype.itemsize + max_requests * spec.vocab_size * 16


def default_num_pages(spec: ModelSpec, budget_bytes: int, dtype: torch.dtype) -> int:
    """KV pages that fit into a byte budget. Raises RunError when not one does."""
    page_bytes = PAGE_TOKENS * spec.kv_bytes_per_token(dtype)
    if budget_bytes < page_bytes:
        raise RunError(
            f"no memory is left for keys and values: a page takes {page_bytes} bytes, {max(0, budget_bytes)} are free"
        )
    return budget_bytes // page_bytes


def allocate_kv(spec: ModelSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One kv_PZ2KD a layer, not initialised: a position is written before it is read."""
    shape = (num_pages, PAGE_TOKENS, 2, spec.num_kv_heads, spec.head_dim)
    try:
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
    except RuntimeError as error:  # torch's out-of-memory error on every device
        num_bytes = num_pages * PAGE_TOKENS * spec.kv_bytes_per_token(dtype)
        raise RunError(
            f"{num_pages} KV pages take {num_bytes} bytes, too many for {device}: lower num_pages"
        ) from error


def _whole_units(num_bytes: int) -> int:
    return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES
