"""Names → base models: the embedded default, a local folder, a GGUF file, a hub id; 4-bit loading and identity."""

from peftkit.base.cache import cache_dir
from peftkit.base.fingerprint import Fingerprint, config_hash
from peftkit.base.folder import ARCHITECTURES
from peftkit.base.load import (
    Quant,
    auto_device,
    auto_dtype,
    check_nf4,
    load_base,
    load_tokenizer,
    module_shapes,
    parameter_shapes,
)
from peftkit.base.names import EMBEDDED, BaseInfo, Embedded, resolve_base

__all__ = [
    "resolve_base",
    "load_base",
    "load_tokenizer",
    "module_shapes",
    "parameter_shapes",
    "BaseInfo",
    "Fingerprint",
    "Embedded",
    "EMBEDDED",
    "ARCHITECTURES",
    "Quant",
    "auto_device",
    "auto_dtype",
    "cache_dir",
    "check_nf4",
    "config_hash",
]
