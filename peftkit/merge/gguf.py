"""Models and LoRAs as GGUF, for llama.cpp, through the `gguf` library.

llama.cpp calls the layers by other names, rotates neighbours where transformers rotates halves of a head (so in the
Llama family the rows of q_proj and k_proj are permuted), and knows how a byte-level tokenizer splits text by a name.
What it has no name for is refused. It attends to the whole text where a base looks back over a window: the two agree up
to the window's length, which is therefore the context that the file declares.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from peftkit.base import parameter_shapes
from peftkit.errors import UnsupportedError
from peftkit.merge.delta import Update, lora_changes
from peftkit.methods import AnyConfig, LoraConfig
from peftkit.methods.lora import EMBEDDING, HEAD, is_tied

logger = logging.getLogger(__name__)

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
Q8_SPACING = 2.2 / 127
"""Spacing of q8_0's steps beside a weight's spread: 32 normal weights reach 2.2 times theirs, in 127 steps."""

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


@dataclass(frozen=True)
class _Names:
    """llama.cpp's names and row order for a base."""

    config: PretrainedConfig

    @property
    def architecture(self) -> "gguf.MODEL_ARCH":
        return _ARCHITECTURES[self.config.model_type]

    def of(self, name: str) -> str:
        table = gguf.get_tensor_name_map(self.architecture, self.config.num_hidden_layers)
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedError(f"GGUF has no name for {name} in a {self.config.model_type} model")
        return found

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor`, whose first dimension is an output of the parameter `name`, in llama.cpp's order of rows."""
        found = _ROTATED.search(name)
        if found is None or self.architecture != gguf.MODEL_ARCH.LLAMA:
            return tensor
        heads = self.config.num_attention_heads if found[1] == "q" else self.config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)


class GgufModel:
    """A merged model as one GGUF file, whose tensors are written one at a time."""

    def __init__(self, path: Path, config: PretrainedConfig, tokenizer_folder: Path, dtype: str) -> None:
        """`tokenizer_folder` holds tokenizer.json and the chat template; `dtype` is float32, float16, bfloat16 or q8_0.

        Raises UnsupportedError for a scaling of positions or a tokenizer that GGUF can't express; no file is made.
        """
        self._names, self._config = _Names(config), config
        self._kind, file_type = _TYPES[dtype]
        self._path = path
        self._writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[self._names.architecture])
        self._factors = _write_settings(self._writer, config)
        _write_tokenizer(self._writer, tokenizer_folder, config.vocab_size)
        self._writer.add_file_type(file_type)
        self._writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def begin(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Writes the header for parameters of these names and shapes, in the order in which `add` will get them."""
        if self._factors is not None:
            self._info("rope_freqs.weight", self._factors, gguf.GGMLQuantizationType.F32)
        for name, shape in shapes.items():
            kind = self._kind_of(shape)
            byte_shape = gguf.quant_shape_to_byte_shape(shape, kind) if _is_packed(kind) else shape
            self._writer.add_tensor_info(
                self._names.of(name),
                byte_shape,
                np.dtype(np.uint8 if _is_packed(kind) else _numpy_type(kind)),
                _num_bytes(shape, kind),
                raw_dtype=kind,
            )
        self._writer.write_header_to_file(self._path)
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        if self._factors is not None:
            self._writer.write_tensor_data(self._factors)

    def add(self, name: str, after: Tensor) -> Tensor:
        """Writes a parameter (float) and returns it as a program that loads the file multiplies by it."""
        kind = self._kind_of(tuple(after.shape))
        rows = self._names.rows(name, after).float().cpu().contiguous().numpy()
        packed = gguf.quants.quantize(rows, kind)
        self._writer.write_tensor_data(packed)
        return _unpermuted(self._names, name, torch.from_numpy(gguf.quants.dequantize(packed, kind)))

    def close(self) -> None:
        self._writer.close()

    def _info(self, name: str, array: "np.ndarray[Any, Any]", kind: "gguf.GGMLQuantizationType") -> None:
        self._writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, raw_dtype=kind)

    def _kind_of(self, shape: tuple[int, ...]) -> "gguf.GGMLQuantizationType":
        """Vectors stay float32, as llama.cpp wants them; a row that is no whole number of blocks is float16."""
        if len(shape) == 1:
            return gguf.GGMLQuantizationType.F32
        block, _ = gguf.GGML_QUANT_SIZES[self._kind]
        return self._kind if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def file_bytes(shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
    """About how large a model's GGUF file will be."""
    kind = _TYPES[dtype][0]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return sum(math.prod(shape) * size // block for shape in shapes)


def check_gguf_lora(config: AnyConfig, where: str) -> LoraConfig:
    """Raises UnsupportedError that names what a GGUF LoRA can't hold."""
    if not isinstance(config, LoraConfig):
        raise UnsupportedError(f"{where}: GGUF has no {config.kind} adapters, only LoRA")
    held = {
        "variant dora": config.variant == "dora",
        "lora_bias": config.lora_bias,
        "modules_to_save": bool(config.modules_to_save),
        "trainable_token_indices": bool(config.trainable_token_indices),
    }
    if lost := [name for name, used in held.items() if used]:
        raise UnsupportedError(
            f"{where}: a GGUF LoRA can't hold {' and '.join(lost)}: peftkit merge --format gguf puts it into the model"
        )
    return config


def write_lora(path: Path, config: LoraConfig, tensors: Mapping[str, Tensor], base: PretrainedConfig) -> None:
    """Writes a LoRA, which `check_gguf_lora` has let through, as a float32 GGUF adapter file.

    llama.cpp scales each layer's product by alpha over the layer's own rank; what differs from that goes into B. Raises
    UnsupportedError for updates of the embeddings.
    """
    names = _Names(base)
    shapes = parameter_shapes(base)
    updates = dict(_updates(config, tensors, shapes, tied=is_tied(base)))
    if ends := [name for name in (EMBEDDING, HEAD) if f"{name}.weight" in updates]:
        raise UnsupportedError(
            f"a GGUF LoRA can't hold an update of {' and '.join(ends)}: peftkit merge … --format gguf puts it into the "
            "model"
        )
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[names.architecture])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, config.alpha)
    for name, update in updates.items():
        factor = update.scale * len(update.lora_A) / config.alpha
        B = names.rows(name, update.lora_B.float() * factor)
        writer.add_tensor(f"{names.of(name)}.lora_a", update.lora_A.float().contiguous().numpy())
        writer.add_tensor(f"{names.of(name)}.lora_b", B.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _updates(
    config: LoraConfig, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, tied: bool
) -> Iterator[tuple[str, Update]]:
    for name, change in lora_changes(config, tensors, shapes, tied=tied).items():
        assert isinstance(change, Update), "nothing else was let through"
        yield name, change


def _unpermuted(names: _Names, name: str, tensor: Tensor) -> Tensor:
    if not _ROTATED.search(name) or names.architecture != gguf.MODEL_ARCH.LLAMA:
        return tensor
    order = names.rows(name, torch.arange(tensor.shape[0]))
    return torch.empty_like(tensor).index_copy_(0, order, tensor)


def _is_packed(kind: "gguf.GGMLQuantizationType") -> bool:
    return kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16)


def _numpy_type(kind: "gguf.GGMLQuantizationType") -> type[np.floating[Any]]:
    return np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16


def _num_bytes(shape: tuple[int, ...], kind: "gguf.GGMLQuantizationType") -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def _write_settings(writer: "gguf.GGUFWriter", config: PretrainedConfig) -> "np.ndarray[Any, Any] | None":
    """The model's sizes. Returns the factors of its rotation's frequencies, where it has any.

    Raises UnsupportedError for what llama.cpp would compute otherwise.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {config.hidden_act}: llama.cpp computes these models with silu alone")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_context_length(_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope: dict[str, Any] = config.rope_parameters or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    match rope.get("rope_type", "default"):
        case "default":
            return None
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
            return None
        case "llama3":
            return _llama3_factors(rope, head_dim)
        case other:
            raise UnsupportedError(f"rope_type {other}: this scaling of positions isn't written as GGUF here")


def _context(config: PretrainedConfig) -> int:
    """The longest text that llama.cpp, which has no sliding window for these models, computes as the base does."""
    whole, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    if not window or window >= whole:
        return whole
    logger.warning(
        "GGUF can't hold the base's sliding window of %d tokens: on longer texts llama.cpp would compute another "
        "model, so the file's context length is %d, not %d",
        *(window, window, whole),
    )
    return window


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> "np.ndarray[Any, Any]":
    """What llama.cpp divides the frequencies of Llama 3.1's rotation by."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = ((context / wavelengths - low) / (high - low)).clip(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _write_tokenizer(writer: "gguf.GGUFWriter", folder: Path, vocab_size: int) -> None:
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        kind = f"{model['type']} tokenizer" + (" with byte fallback" if model.get("byte_fallback") else "")
        raise UnsupportedError(f"a {kind} isn't written as GGUF here, only byte-level BPE")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(content))
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {id: text for text, id in model["vocab"].items()} | {id: token["content"] for id, token in added.items()}
    normal, control, own, unused = (gguf.TokenType[n] for n in ("NORMAL", "CONTROL", "USER_DEFINED", "UNUSED"))
    kinds = [
        unused if id not in texts else normal if id not in added else control if added[id]["special"] else own
        for id in range(vocab_size)
    ]
    writer.add_token_list([texts.get(id, f"[PAD{id}]") for id in range(vocab_size)])
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    # where tokenizer_config.json doesn't say, our texts begin without a token of their own
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text."""
    steps: dict[str, Any] = content.get("pre_tokenizer") or {}
    parts: list[dict[str, Any]] = steps.get("pretokenizers", [steps])
    kinds = [part.get("type") for part in parts]
    pattern = parts[0].get("pattern", {}).get("Regex") if kinds[0] == "Split" else None
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and pattern in (_LLAMA3_SPLIT, _QWEN2_SPLIT):
        return "llama-bpe" if pattern == _LLAMA3_SPLIT else "qwen2"
    raise UnsupportedError(
        "the tokenizer splits text in a way that has no name in GGUF here: known are GPT-2's, SmolLM's, Llama 3's and "
        "Qwen's"
    )
