"""The identity of an adapter: a hash over what it computes, not over where it lies or how it is called."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from peftkit.methods import AnyConfig

NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,128}")
"""What an adapter may be called where it is served; a tenant too."""


def uid_of(config: AnyConfig, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over the config's identity and, in order of name, each tensor's name, dtype, shape and bytes.

    Every cache of an adapter's weights or of keys and values made with them is keyed by this.
    """
    digest = hashlib.sha256(json.dumps(config.identity(), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def uid_of_parts(parts: Sequence[tuple[AnyConfig, Mapping[str, Tensor]]]) -> str:
    """`uid_of` a single part; of several, SHA-256 over those of each, in a fixed order."""
    uids = sorted(uid_of(config, tensors) for config, tensors in parts)
    return uids[0] if len(uids) == 1 else hashlib.sha256("|".join(uids).encode()).hexdigest()
