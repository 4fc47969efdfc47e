"""How much of a GPU's arithmetic training uses."""

import torch

_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Part of a GPU's name → its makers' figure for dense bfloat16 products with float32 sums, a second."""


def flops_rate(device: torch.device, count: int) -> float | None:
    """Floating-point operations a second of `count` such devices at best; None where that isn't known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate * count for part, rate in _BF16_FLOPS.items() if part in name), None)


def mfu(num_base: int, tokens_per_s: float, rate: float) -> float:
    """Share of `rate` that the products with a frozen base's weights need: 2 N a token forward, 2 N back to its input.

    What gradient checkpointing computes again doesn't count.
    """
    return 4 * num_base * tokens_per_s / rate
