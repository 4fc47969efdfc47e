"""What makes two bases the same: hashes of configuration, weights and tokenizer that survive re-sharding."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from peftkit.base.cache import remembered_hash
from peftkit.base.folder import check_folder, read_json, stored_tensors, weight_files
from peftkit.errors import BaseModelError

# what a config may say without changing any logit: how it is stored, run, named and stopped
_NOT_FUNCTION = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_model_name_or_path",
    "use_cache", "_attn_implementation", "attn_implementation", "_attn_implementation_internal", "output_attentions",
    "output_hidden_states", "return_dict", "is_encoder_decoder", "attention_dropout", "initializer_range",
    "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "base_model_tp_plan", "base_model_pp_plan", "quantization_config",
}  # fmt: skip
_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class Fingerprint:
    """A base's identity; each part but `architecture` is a SHA-256 as hex."""

    architecture: str
    """The class of the model: "LlamaForCausalLM"."""
    config: str
    """Over what differs from the architecture's default configuration and changes logits."""
    weights: str
    """Over (name, dtype, shape, bytes) of each tensor by sorted name: how they are split into files doesn't matter."""
    tokenizer: str
    """Over the ids of all tokens, added ones too, and the merges; the chat template is apart."""


def fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of a base folder. The weights are read once and their hash remembered in the cache."""
    return Fingerprint(
        architecture=check_folder(path, nf4=True),
        config=config_hash(AutoConfig.from_pretrained(path, local_files_only=True)),
        weights=remembered_hash("weights", weight_files(path), lambda: _weights_hash(path)),
        tokenizer=_tokenizer_hash(path),
    )


def config_hash(config: PretrainedConfig) -> str:
    """SHA-256 over the settings of a config that change the model's function."""
    defaults = type(config)().to_dict()
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if key not in _NOT_FUNCTION and value is not None and (key == "model_type" or value != defaults.get(key))
    }
    return _hash_json(settings)


def _weights_hash(path: Path) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(stored_tensors(path).items()):
        digest.update(f"{name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            left = tensor.num_bytes
            while left:
                piece = file.read(min(left, _READ_BYTES))
                if not piece:
                    raise BaseModelError(f"{tensor.file}: ended while it was read; is another program writing it?")
                digest.update(piece)
                left -= len(piece)
    return digest.hexdigest()


def _tokenizer_hash(path: Path) -> str:
    file = path / "tokenizer.json"
    if file.is_file():
        content = read_json(file)
    else:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content.get("model") or {}
    vocabulary = model.get("vocab") or {}
    scores: list[float] = []
    if isinstance(vocabulary, list):  # unigram: [piece, score], the id is the place
        scores = [score for _, score in vocabulary]
        vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    # whether a token stands among the added ones or in the vocabulary alone differs by the tool that wrote the file
    ids = vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    # older files join a merge's two halves with a space
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    return _hash_json({"ids": ids, "merges": merges, "scores": scores})


def _hash_json(value: Any) -> str:
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """Whole floats as ints: 10000 and 10000.0 are one setting."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
