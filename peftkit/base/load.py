"""A frozen base model in memory, and the shapes of a model's layers without its weights."""

import importlib.util
import logging
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from peftkit.base.divided import divide
from peftkit.base.fill import Filling
from peftkit.base.folder import check_folder
from peftkit.base.names import BaseInfo, resolve_base
from peftkit.errors import BaseModelError, InputError, RunError, did_you_mean

logger = logging.getLogger(__name__)

Quant = Literal["none", "nf4"]

_NF4_BLOCK = 64
"""Weights that share a scale."""

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def auto_device(device: str | torch.device) -> torch.device:
    """The device a name means; "auto" is the current GPU if there is one, else the CPU."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(f"device {device!r}: it must be auto, cpu, cuda or cuda:N", field="device") from None
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device {device!r}: there is no GPU that torch can use; try peftkit doctor", field="device"
            )
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found


def auto_dtype(dtype: str | torch.dtype, device: torch.device, *, field: str = "dtype") -> torch.dtype:
    """The dtype a name means; "auto" is bf16 on a GPU that has it, else fp32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bf16 else torch.float32
    if dtype not in _DTYPES:
        hint = did_you_mean(dtype, ["auto", *_DTYPES]) or f"; it must be auto or one of {', '.join(_DTYPES)}"
        raise InputError(f"{field} {dtype!r}{hint}", field=field)
    return _DTYPES[dtype]


def load_base(
    name: str | Path | BaseInfo,
    *,
    quant: Quant = "none",
    double_quant: bool = True,
    compute_dtype: str | torch.dtype = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    divided: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a base and its tokenizer: frozen, in eval mode, on one device.

    `dtype` is that of the weights which aren't quantised. With quant="nf4" every linear layer but `lm_head` is a
    bitsandbytes `Linear4bit` (blocks of 64, double quantisation unless switched off) that computes in `compute_dtype`.
    The model carries `peftkit_base` (`BaseInfo`) and `peftkit_quant`. With `divided` its layers are loaded one at a
    time and divided over the processes of torch's default group (`divided.py`).

    Raises `BaseModelError` for a base that isn't there, damaged or not supported, `InputError` for a bad argument,
    `RunError` when the device has too little memory.
    """
    where = auto_device(device)
    weights_dtype = auto_dtype(dtype, where)
    settings: dict[str, Any] = {}
    if quant == "nf4":
        computing = auto_dtype(compute_dtype, where, field="compute_dtype")
        settings["quantization_config"] = _nf4(double_quant, computing)
    elif quant != "none":
        raise InputError(
            f"quant {quant!r}: it must be none or nf4{did_you_mean(quant, ['none', 'nf4'])}", field="quant"
        )
    info = name if isinstance(name, BaseInfo) else resolve_base(name)
    if quant == "nf4":
        check_nf4(info, where)
    if divided:
        model = _load_divided(info, weights_dtype, where, settings)
    else:
        model = _load(info, weights_dtype, where, settings)
    compute_as_asked(model)
    model.requires_grad_(False)
    model.eval()
    model.__dict__["peftkit_base"] = info
    model.__dict__["peftkit_quant"] = quant
    return model, load_tokenizer(info)


def check_nf4(info: BaseInfo, device: torch.device) -> None:
    """Raises BaseModelError for a base that can't be held in NF4 on a device.

    On a CPU bitsandbytes gives wrong weights back, without an error, for rows that are no whole number of blocks.
    """
    if device.type != "cpu":
        return
    config = AutoConfig.from_pretrained(info.path, local_files_only=True)
    for path, (_, in_features) in module_shapes(config).items():
        if ".layers." in path and in_features % _NF4_BLOCK:
            raise BaseModelError(
                f"{info.name}: {path} has {in_features} inputs, and NF4 on a CPU needs a multiple of {_NF4_BLOCK}: "
                "use quant none, or a GPU",
                field="quant",
            )


def load_tokenizer(info: BaseInfo) -> PreTrainedTokenizerBase:
    """A base's tokenizer, with `model_max_length` set to the base's context where the files leave it open."""
    tokenizer = AutoTokenizer.from_pretrained(info.path, local_files_only=True)
    if not tokenizer.is_fast:
        raise BaseModelError(
            f"{info.path}: its tokenizer has no fast form (tokenizer.json), which spans are found with"
        )
    config = AutoConfig.from_pretrained(info.path, local_files_only=True)
    if tokenizer.model_max_length > int(1e9):  # transformers writes 1e30 for "not set"
        tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def module_shapes(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Path of every linear layer and embedding of the model → shape of its weight.

    (out_features, in_features) for a linear layer, (num_embeddings, embedding_dim) for an embedding. No weight is
    allocated.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in parameter_shapes(config).items()
        if name.endswith(".weight") and len(shape) == 2
    }


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter of the model; a tied weight is there under each of its names."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _nf4(double_quant: bool, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("quant nf4 needs bitsandbytes, which isn't installed: pip install bitsandbytes", field="quant")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["lm_head"],  # it has this name for 4 bits too; a tied one is the embedding itself
    )


def compute_as_asked(model: PreTrainedModel) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights at the first forward in eval mode on a CPU with AVX512-BF16.

    It would round their scales to bf16 for good, compute in bf16 whatever was asked, and cut gradients off.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False


def _load(info: BaseInfo, dtype: torch.dtype, device: torch.device, settings: dict[str, Any]) -> PreTrainedModel:
    check_folder(info.path)
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = from_pretrained(
            info.path,
            dtype=dtype,
            device_map={"": device},
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **settings,
        )
    except torch.OutOfMemoryError as error:
        raise _too_large(info, device) from error
    if missing := sorted(report["missing_keys"]):
        raise BaseModelError(f"{info.path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    for name, stored, wanted in report["mismatched_keys"]:
        raise BaseModelError(
            f"{info.path}: tensor {name} has shape {list(stored)} where config.json says {list(wanted)}"
        )
    if unexpected := sorted(report["unexpected_keys"]):
        logger.warning("%s: %d tensors belong to no layer, the first is %s", info.path, len(unexpected), unexpected[0])
    return model


def _load_divided(
    info: BaseInfo, dtype: torch.dtype, device: torch.device, settings: dict[str, Any]
) -> PreTrainedModel:
    model = _load(info, dtype, torch.device("meta"), settings)  # with all its checks and no data
    filling, layers = Filling(model, info.path, dtype, device), f"{model.base_model_prefix}.layers"
    try:
        filling.fill(outside=layers)
        divide(model, lambda index: filling.fill_module(f"{layers}.{index}"))
    except torch.OutOfMemoryError as error:
        raise _too_large(info, device) from error
    return model


def _too_large(info: BaseInfo, device: torch.device) -> RunError:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return RunError(f"base {info.name} doesn't fit on {device}, where {free / 1e9:.1f} GB are free")
