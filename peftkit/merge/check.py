"""Do two folders hold the same model? Two models, or an adapter over its base and the model it was merged into."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from peftkit.artifact import Artifact, read_adapter
from peftkit.artifact.files import CONFIG_FILE
from peftkit.base import auto_device, auto_dtype, resolve_base
from peftkit.base.load import compute_as_asked
from peftkit.errors import AdapterError, BaseModelError, InputError
from peftkit.merge.adapter import named_base
from peftkit.merge.delta import lora_changes
from peftkit.merge.equivalence import Equivalence, compare, logits_of, probe_texts, relative_limit
from peftkit.merge.export import REPORT_FILE, default_mode, stored_dtype
from peftkit.merge.model import mergeable
from peftkit.merge.stream import Kept, merged_parameters
from peftkit.merge.verify import adapted_logits, load_for
from peftkit.merge.weights import EMBEDDING_WEIGHT, HEAD_WEIGHT, BaseWeights, Mode, nf4_of
from peftkit.methods.frozen import dequantized


@dataclass(frozen=True)
class Check:
    """What a comparison of two folders found."""

    a: Path
    b: Path
    equivalence: Equivalence
    kept: float | None
    """Share of the adapter's change that the model keeps; None where neither folder is an adapter."""
    kept_by_layer: dict[str, float] | None


def check(a: str | Path, b: str | Path, *, base: str | Path | None = None, limit: float | None = None) -> Check:
    """Compares the logits of two folders over real prompts; `a` is the reference and may be an adapter.

    A folder is of the HF layout (bitsandbytes' four bits too) or holds one GGUF file, which may also be named itself.
    `base` is what the adapter stands on, by default what it names. `limit` on the relative difference is by default
    what rounding to the types of both explains. That it is passed is in the result, and no error.

    Raises AdapterError or BaseModelError for a folder that can't be read, InputError where `b` is an adapter or the two
    have different vocabularies.
    """
    a, b = Path(a), Path(b)
    if (b / CONFIG_FILE).exists():
        raise InputError(
            f"{b} is an adapter: name it first, and the model that it was merged into second", field="check"
        )
    texts, computed_in = probe_texts(), auto_dtype("auto", auto_device("auto"))
    model, tokenizer, stored = _model(b, computed_in)
    found = logits_of(model, tokenizer, texts)
    kept: Kept | None = None
    if (a / CONFIG_FILE).exists():
        artifact = read_adapter(a)
        kept = _kept(artifact, _base_of(artifact, base), _mode(artifact, b), model)
        del model
        reference, held = _adapted(artifact, _base_of(artifact, base), _mode(artifact, b), texts)
    else:
        del model
        other, tokenizer, held = _model(a, computed_in)
        reference = logits_of(other, tokenizer, texts)
    _require_comparable(reference, found, a, b)
    num_layers = AutoConfig.from_pretrained(**_source(b)).num_hidden_layers
    limit = relative_limit([stored, held, computed_in], num_layers) if limit is None else limit
    shares = (None, None) if kept is None else (kept.share, kept.by_layer())
    return Check(a, b, compare(reference, found, limit), *shares)


def _source(path: Path) -> dict[str, Any]:
    """How transformers opens a folder, a folder with one GGUF file, or such a file."""
    if path.suffix == ".gguf" and path.is_file():
        return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}
    if (path / "config.json").is_file():
        return {"pretrained_model_name_or_path": path, "local_files_only": True}
    if len(files := list(path.glob("*.gguf"))) == 1:
        return _source(files[0])
    raise BaseModelError(f"{path} is neither a model's folder nor an adapter's: it has no config.json", field="check")


def _model(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """A model, its tokenizer and the type its weights are held in."""
    source = _source(path)
    try:
        held = AutoConfig.from_pretrained(**source).dtype
        settings: dict[str, Any] = {**source, "dtype": dtype, "device_map": {"": auto_device("auto")}}
        model = AutoModelForCausalLM.from_pretrained(**settings)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BaseModelError(f"{path}: can't be loaded ({str(error).splitlines()[0]})", field="check") from error
    compute_as_asked(model)
    is_gguf = "gguf_file" in source
    return model.eval(), tokenizer, held if isinstance(held, torch.dtype) else torch.float16 if is_gguf else dtype


def _base_of(artifact: Artifact, base: str | Path | None) -> str | Path:
    name = base or named_base(artifact)
    if not name:
        raise AdapterError(f"{artifact.path} doesn't say which base it was made for: name it with --base", field="base")
    return name


def _mode(artifact: Artifact, merged: Path) -> Mode:
    """What the merged folder says it was merged into, else what the adapter was trained on."""
    try:
        said = json.loads((merged / REPORT_FILE).read_text(encoding="utf-8"))["mode"]
    except (OSError, ValueError, KeyError, TypeError):
        return default_mode(artifact)
    return said if said in ("dequantized", "original", "requantize") else default_mode(artifact)


def _kept(artifact: Artifact, base: str | Path, mode: Mode, model: PreTrainedModel) -> Kept:
    weights = BaseWeights(resolve_base(base), None if mode == "original" else nf4_of(artifact))
    changes = lora_changes(mergeable(artifact), artifact.tensors, weights.shapes, tied=weights.tied)
    written = dict(model.named_parameters(remove_duplicate=False))
    kept = Kept()
    tied = weights.tied and written[HEAD_WEIGHT] is written[EMBEDDING_WEIGHT]
    for parameter in merged_parameters(weights, changes, tied=tied):
        if parameter.name in changes:
            kept.add(parameter.name, parameter.before, parameter.after, dequantized(written[parameter.name]))
    return kept


def _adapted(artifact: Artifact, base: str | Path, mode: Mode, texts: list[str]) -> tuple[list[Tensor], torch.dtype]:
    info = resolve_base(base)
    model, tokenizer = load_for(info, mode, artifact, stored_dtype(info))
    return adapted_logits(model, artifact, tokenizer, texts), model.dtype


def _require_comparable(reference: list[Tensor], found: list[Tensor], a: Path, b: Path) -> None:
    shapes = [tuple(one.shape) for one in reference], [tuple(one.shape) for one in found]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{a} and {b} have different vocabularies or tokenizers: they can't be compared", field="check"
        )
