"""Writing a merged model as a folder, a parameter at a time and with proof: HF, bitsandbytes' NF4, or GGUF."""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, BitsAndBytesConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from peftkit.artifact import Artifact, read_adapter
from peftkit.base import ARCHITECTURES, BaseInfo, auto_dtype, load_tokenizer, resolve_base
from peftkit.errors import InputError, RunError
from peftkit.merge.card import CARD_FILE, model_card
from peftkit.merge.delta import Change, lora_changes
from peftkit.merge.equivalence import Equivalence, compare, logits_of, probe_texts, relative_limit
from peftkit.merge.folder import check_room, check_target, folder_bytes, new_folder
from peftkit.merge.gguf import Q8_SPACING, GgufModel, file_bytes
from peftkit.merge.model import mergeable
from peftkit.merge.shards import ShardWriter, write_index
from peftkit.merge.stream import Cast, Encoding, HeldInNf4, Kept, Parameter, merged_parameters, stays_tied
from peftkit.merge.verify import adapted_logits, load_for, written_logits
from peftkit.merge.weights import HEAD_WEIGHT, BaseWeights, Mode, Nf4, nf4_of

logger = logging.getLogger(__name__)

Format = Literal["hf", "bnb4", "gguf"]
"""A folder for transformers, one that bitsandbytes holds in four bits, or a GGUF file for llama.cpp."""

REPORT_FILE = "peftkit_merge.json"
MIN_KEPT = 0.8
"""Least share of the change that what is written must keep. Of updates a tenth as large as the weights NF4 keeps 0.84,
of those half that size 0.31, and the answers are the base's."""


@dataclass(frozen=True)
class MergeReport:
    """What was merged, and how well the result stands for base and adapter."""

    out: Path
    mode: Mode
    format: Format
    dtype: str
    """Type of the written weights; with bnb4 of those that aren't held in four bits."""
    adapter: Path
    adapter_uid: str
    base: str
    num_merged: int
    """Weights that the adapter changed."""
    num_bytes: int
    """Size of the folder."""
    kept: float
    """Share of the change that the written weights keep; `stream.Kept` says how it is counted."""
    kept_by_layer: dict[str, float]
    equivalence: Equivalence | None
    """None where it wasn't asked for."""


@dataclass(frozen=True)
class _Plan:
    """What a merge is to do, settled before it starts."""

    info: BaseInfo
    artifact: Artifact
    weights: BaseWeights
    changes: Mapping[str, Change]
    mode: Mode
    format: Format
    dtype: str
    nf4: Nf4
    tied: bool

    @property
    def cast_to(self) -> torch.dtype:
        """The written weights' type in torch's terms; blocks of q8_0 are made of float32."""
        return torch.float32 if self.dtype == "q8_0" else getattr(torch, self.dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of what is written, in the order of writing."""
        names: list[str] = []
        for name in self.weights.names():
            names.append(name)
            if name == "model.embed_tokens.weight" and self.weights.tied and not self.tied:
                names.append(HEAD_WEIGHT)
        return {name: self.weights.shapes[name] for name in names}

    @property
    def num_bytes(self) -> int:
        """About how large the weights will be."""
        if self.format == "gguf":
            return file_bytes(self.shapes.values(), self.dtype)
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        held = sum(size for name, size in sizes.items() if self.format == "bnb4" and self.weights.is_quantized(name))
        return (sum(sizes.values()) - held) * self.cast_to.itemsize + int(held * 0.57)

    def parameters(self) -> Iterator[Parameter]:
        return merged_parameters(self.weights, self.changes, tied=self.tied)


def merge_to_folder(
    adapter: str | Path | Artifact,
    out: str | Path,
    base: str | Path | BaseInfo,
    *,
    into: Mode | None = None,
    format: Format | None = None,
    dtype: str = "auto",
    verify: bool = True,
) -> MergeReport:
    """Merges an adapter into its base and writes the new folder `out`, with tokenizer, chat template and a model card.

    `into` is by default what the adapter was trained on: "dequantized" after NF4, else "original". "requantize" holds
    the result in NF4 again, which is format "bnb4"; else the format is "hf" or "gguf". `dtype` "auto" is that of the
    base as it is stored, or float16 for GGUF, which also takes "q8_0". Never more than a few weights are in memory, but
    to verify: then the written model is read back and its logits are compared with those of base and adapter over real
    prompts.

    Raises InputError when `out` is taken or the settings contradict each other, AdapterError or BaseModelError for a
    bad adapter or base, UnsupportedError for a method that can't be merged, RunError when there is no room, when too
    little of the change survives, or when the two don't agree. Then `out` isn't there.
    """
    out = Path(out)
    check_target(out)
    info = base if isinstance(base, BaseInfo) else resolve_base(base)
    plan = _planned(info, adapter, into, format, dtype)
    check_room(out, plan.num_bytes)
    with new_folder(out) as staging:
        tokenizer = load_tokenizer(info)
        if template := plan.artifact.record.get("chat_template"):
            tokenizer.chat_template = template["text"]
        tokenizer.save_pretrained(staging)
        kept = _write_gguf(plan, staging) if plan.format == "gguf" else _write_hf(plan, staging)
        _require_kept(kept.share, plan)
        equivalence = _verified(plan, staging, tokenizer) if verify else None
        report = MergeReport(
            out=out,
            mode=plan.mode,
            format=plan.format,
            dtype=plan.dtype,
            adapter=plan.artifact.path,
            adapter_uid=plan.artifact.uid,
            base=info.name,
            num_merged=len(plan.changes),
            num_bytes=folder_bytes(staging),
            kept=kept.share,
            kept_by_layer=kept.by_layer(),
            equivalence=equivalence,
        )
        content = _content(report, info)
        (staging / REPORT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (staging / CARD_FILE).write_text(model_card(content, plan.artifact, info), encoding="utf-8")
    return report


def default_mode(artifact: Artifact) -> Mode:
    """What an adapter is merged into unless told otherwise: the weights that it was trained on."""
    return "dequantized" if artifact.record.get("quant") == "nf4" else "original"


def stored_dtype(info: BaseInfo) -> torch.dtype:
    """The dtype of a base as its folder says it."""
    dtype = AutoConfig.from_pretrained(info.path).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _planned(
    info: BaseInfo, adapter: str | Path | Artifact, into: Mode | None, format: Format | None, dtype: str
) -> _Plan:
    artifact = adapter if isinstance(adapter, Artifact) else read_adapter(adapter, base=info)
    config = mergeable(artifact)
    trained_into = default_mode(artifact)
    mode = into or ("requantize" if format == "bnb4" else trained_into)
    format = format or ("bnb4" if mode == "requantize" else "hf")
    if (mode == "requantize") != (format == "bnb4"):
        raise InputError(
            f"format {format} doesn't go with into {mode}: requantize writes bnb4, and nothing else does",
            field="format",
        )
    if mode == "original" != trained_into:
        logger.warning("%s was trained on NF4: merged into the original weights it is another model", artifact.path)
    if mode != "original" and artifact.record.get("quant") == "none":
        logger.warning("%s wasn't trained on NF4: merged into NF4 weights it is another model", artifact.path)
    name = dtype
    if dtype != "q8_0":
        by_default = torch.float16 if format == "gguf" else stored_dtype(info)
        name = _name(by_default if dtype == "auto" else auto_dtype(dtype, torch.device("cpu")))
    elif format != "gguf":
        raise InputError("dtype q8_0 is a type of GGUF files: add format gguf", field="dtype")
    nf4 = nf4_of(artifact)
    weights = BaseWeights(info, None if mode == "original" else nf4)
    changes = lora_changes(config, artifact.tensors, weights.shapes, tied=weights.tied)
    cast_to = torch.float32 if name == "q8_0" else getattr(torch, name)
    tied = stays_tied(weights, changes, cast_to)
    return _Plan(info, artifact, weights, changes, mode, format, name, nf4, tied)


def _write_hf(plan: _Plan, folder: Path) -> Kept:
    cast_to = plan.cast_to
    encoding: Encoding = HeldInNf4(plan.weights, plan.nf4, cast_to) if plan.format == "bnb4" else Cast(cast_to)
    kept, files, num_bytes = Kept(), dict[str, str](), 0
    for file, parameters in groupby(plan.parameters(), key=lambda parameter: parameter.file):
        with ShardWriter(folder / file, max_tensors=6 * (len(plan.shapes) + 1)) as writer:
            for parameter in parameters:
                parts, written = encoding.encode(parameter)
                for name, tensor in parts.items():
                    writer.add(name, tensor)
                    files[name] = file
                if parameter.name in plan.changes:
                    kept.add(parameter.name, parameter.before, parameter.after, written)
        num_bytes += writer.num_bytes
    if set(files.values()) != {"model.safetensors"}:
        write_index(folder, files, num_bytes)
    _write_config(plan, folder)
    return kept


def _write_config(plan: _Plan, folder: Path) -> None:
    config: PretrainedConfig = AutoConfig.from_pretrained(plan.info.path, local_files_only=True)
    config.architectures = [ARCHITECTURES[config.model_type]]
    config.tie_word_embeddings = plan.tied
    config.dtype = plan.cast_to
    if plan.format == "bnb4":
        nf4 = plan.nf4
        config.quantization_config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=nf4.double_quant,
            bnb_4bit_compute_dtype=nf4.dtype,
            llm_int8_skip_modules=["lm_head"],
        ).to_dict()
    config.save_pretrained(folder)
    if (plan.info.path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(plan.info.path, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    generation.save_pretrained(folder)


def _write_gguf(plan: _Plan, folder: Path) -> Kept:
    """Writes model-TYPE.gguf; the tokenizer's files, which are in it, are taken away."""
    kept = Kept()
    tokenizer_files = list(folder.iterdir())
    path = (
        folder / f"model-{ {'float32': 'f32', 'float16': 'f16', 'bfloat16': 'bf16'}.get(plan.dtype, plan.dtype) }.gguf"
    )
    model = GgufModel(path, plan.weights.config, folder, plan.dtype)
    try:
        model.begin(plan.shapes)
        for parameter in plan.parameters():
            written = model.add(parameter.name, parameter.after)
            if parameter.name in plan.changes:
                kept.add(parameter.name, parameter.before, parameter.after, written)
    finally:
        model.close()
    for file in tokenizer_files:
        file.unlink()
    return kept


def _verified(plan: _Plan, staging: Path, tokenizer: PreTrainedTokenizerBase) -> Equivalence:
    model, _ = load_for(plan.info, plan.mode, plan.artifact, stored_dtype(plan.info))
    texts, computed_in = probe_texts(), model.dtype
    bare = logits_of(model, tokenizer, texts) if plan.mode == "requantize" else None
    reference = adapted_logits(model, plan.artifact, tokenizer, texts)
    del model  # before the merged one is read
    spacing = Q8_SPACING if plan.dtype == "q8_0" else plan.cast_to
    limit = relative_limit([spacing, computed_in], plan.weights.config.num_hidden_layers)
    if bare is not None:  # rounding to four bits is no small error: the model must at least be nearer than the base is
        limit = max(limit, compare(reference, bare, 0.0).relative)
    equivalence = compare(reference, written_logits(staging, computed_in, tokenizer, texts), limit)
    _require(equivalence, plan.dtype)
    return equivalence


def _require(equivalence: Equivalence, dtype: str) -> None:
    if not equivalence.holds:
        remedy = "" if dtype == "float32" else "; --dtype float32 rounds less"
        raise RunError(
            f"the merged model's logits are {equivalence.relative:.2g} of their size away from those of base and "
            f"adapter, more than the {equivalence.limit:.2g} that rounding to {dtype} explains: nothing is "
            f"written{remedy}"
        )


def _require_kept(share: float, plan: _Plan) -> None:
    if not share >= MIN_KEPT:
        how = "NF4" if plan.format == "bnb4" else plan.dtype
        remedy = "--into dequantized keeps it" if plan.format == "bnb4" else "--dtype float32 keeps it"
        raise RunError(
            f"only {share:.1%} of the adapter's change survives rounding to {how}, less than {MIN_KEPT:.0%}: nothing "
            f"is written; {remedy}"
        )


def _content(report: MergeReport, info: BaseInfo) -> dict[str, object]:
    """What travels with the model: no paths of this machine."""
    return {
        "mode": report.mode,
        "format": report.format,
        "dtype": report.dtype,
        "adapter_uid": report.adapter_uid,
        "base": report.base,
        "base_fingerprint": asdict(info.fingerprint),
        "num_merged": report.num_merged,
        "kept": report.kept,
        "kept_by_layer": report.kept_by_layer,
        "equivalence": None if report.equivalence is None else asdict(report.equivalence),
        "peftkit_version": version("peftkit"),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
