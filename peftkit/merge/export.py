"""Writing a merged model as an HF folder, with proof, and an adapter as a plain HF PEFT folder."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from peftkit.artifact import Artifact, put_on, read_adapter, write_adapters_library
from peftkit.artifact.files import CONFIG_FILE, TENSOR_FILE
from peftkit.base import BaseInfo, auto_device, auto_dtype, load_base, resolve_base
from peftkit.base.folder import stored_tensors
from peftkit.errors import RunError, UnsupportedError
from peftkit.merge.equivalence import Equivalence, compare, logits_of, probe_texts, relative_limit
from peftkit.merge.folder import check_room, check_target, folder_bytes, new_folder
from peftkit.merge.model import changes_of, merge_artifact, mergeable
from peftkit.methods import BottleneckConfig

logger = logging.getLogger(__name__)

Mode = Literal["dequantized", "original"]
"""What the update is added to: the base's weights after NF4 and back, or as they are stored."""

REPORT_FILE = "peftkit_merge.json"


@dataclass(frozen=True)
class MergeReport:
    """What was merged, and how well the result stands for base and adapter."""

    out: Path
    mode: Mode
    dtype: str
    """Type of the written weights."""
    adapter: Path
    adapter_uid: str
    base: str
    num_merged: int
    """Weights that the adapter changed."""
    num_bytes: int
    """Size of the folder."""
    equivalence: Equivalence | None
    """None where it wasn't asked for."""


def merge_to_folder(
    adapter: str | Path,
    out: str | Path,
    base: str | Path | BaseInfo,
    *,
    into: Mode | None = None,
    dtype: str = "auto",
    verify: bool = True,
) -> MergeReport:
    """Merges an adapter folder into its base and writes the new HF folder `out`, with tokenizer and chat template.

    `into` is by default what the adapter was trained on: "dequantized" after NF4, else "original". `dtype` "auto" is
    that of the base as it is stored. With `verify` the written model is read back and its logits are compared with
    those of base and adapter over real prompts.

    Raises InputError when `out` is taken, AdapterError or BaseModelError for a bad adapter or base, UnsupportedError
    for a method that can't be merged, RunError when there is no room or the two don't agree. Then `out` isn't there.
    """
    out = Path(out)
    check_target(out)
    info = base if isinstance(base, BaseInfo) else resolve_base(base)
    artifact = read_adapter(adapter, base=info)
    mergeable(artifact)
    mode = into or default_mode(artifact)
    if mode == "original" != default_mode(artifact):
        logger.warning("%s was trained on NF4: merged into the original weights it is another model", adapter)
    target = stored_dtype(info) if dtype == "auto" else auto_dtype(dtype, torch.device("cpu"))
    num_weights = sum(math.prod(tensor.shape) for tensor in stored_tensors(info.path).values())
    check_room(out, num_weights * target.itemsize)
    model, tokenizer = _load(info, mode, artifact)
    with new_folder(out) as staging:
        merged = merge_artifact(model, artifact, target)
        num_merged = len(changes_of(artifact, model))
        merged.save_pretrained(staging)
        del merged
        tokenizer.save_pretrained(staging)
        equivalence = None
        if verify:
            texts, computed_in = probe_texts(), model.dtype
            reference = _adapted_logits(model, artifact, tokenizer, texts)
            del model  # before the merged one is read
            limit = relative_limit([target, computed_in], AutoConfig.from_pretrained(info.path).num_hidden_layers)
            equivalence = compare(reference, _written_logits(staging, computed_in, tokenizer, texts), limit)
            _require(equivalence, target)
        report = MergeReport(
            out=out,
            mode=mode,
            dtype=_name(target),
            adapter=artifact.path,
            adapter_uid=artifact.uid,
            base=info.name,
            num_merged=num_merged,
            num_bytes=folder_bytes(staging),
            equivalence=equivalence,
        )
        _write_report(staging / REPORT_FILE, report, info)
    return report


def default_mode(artifact: Artifact) -> Mode:
    """What an adapter is merged into unless told otherwise: the weights that it was trained on."""
    return "dequantized" if artifact.record.get("quant") == "nf4" else "original"


def stored_dtype(info: BaseInfo) -> torch.dtype:
    """The dtype of a base as its folder says it."""
    dtype = AutoConfig.from_pretrained(info.path).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def export_peft(adapter: str | Path, out: str | Path, *, base_name: str | None = None) -> Artifact:
    """Writes an adapter as the plain HF PEFT folder `out` and returns it as read back.

    `base_name` is what the folder says its base is: a path or hub id that transformers opens; by default what the
    adapter's own folder says. Raises AdapterError for a folder that can't be read, UnsupportedError for a method that
    HF PEFT doesn't have, InputError when `out` is taken, RunError when it can't be written.
    """
    out = Path(out)
    artifact = read_adapter(adapter)
    if isinstance(artifact.config, BottleneckConfig):
        raise UnsupportedError(
            f"{adapter}: HF PEFT has no bottleneck adapters, so it could not read the export: use format adapters"
        )
    fields = _fields(artifact) | ({"base_model_name_or_path": base_name} if base_name else {})
    with new_folder(out) as staging:
        safetensors.torch.save_file(artifact.tensors, staging / TENSOR_FILE, metadata={"format": "pt"})
        (staging / CONFIG_FILE).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if read_adapter(staging).uid != artifact.uid:
            raise RunError(f"{out} doesn't read back as {artifact.path}: is the disk sound?")
    return read_adapter(out)


def export_adapters(
    adapter: str | Path, out: str | Path, *, name: str = "adapter", base_name: str | None = None
) -> Artifact:
    """Writes bottleneck adapters as the new folder `out` for the `adapters` library and returns it as read back.

    `name` is what the library calls the adapter, `base_name` what the folder calls its base; by default as the adapter
    does. Raises AdapterError for a folder that can't be read or doesn't say enough of its base, UnsupportedError for
    another method, InputError when `out` is taken or for a name that the library can't use, RunError when it can't be
    written.
    """
    out = Path(out)
    artifact = read_adapter(adapter)
    with new_folder(out) as staging:
        write_adapters_library(staging, artifact, name=name, base_name=base_name)
        if read_adapter(staging).uid != artifact.uid:
            raise RunError(f"{out} doesn't read back as {artifact.path}: is the disk sound?")
    return read_adapter(out)


def named_base(artifact: Artifact) -> str | None:
    """The base that an adapter's folder names, as it was called where the adapter was made."""
    fields = _fields(artifact)
    return fields.get("base_model_name_or_path") or fields.get("model_name")


def transformers_name(base: str) -> str:
    """What transformers opens a base by: a hub id as it is, any other base by the folder it lies in on this machine.

    Raises BaseModelError for one that isn't here.
    """
    path = Path(base)
    is_hub_id = "/" in base and not path.is_absolute() and not path.exists()
    return base if is_hub_id else str(resolve_base(base).path)


def _fields(artifact: Artifact) -> dict[str, Any]:
    return json.loads((artifact.path / CONFIG_FILE).read_text(encoding="utf-8"))


def _load(info: BaseInfo, mode: Mode, artifact: Artifact) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base with the weights that the adapter is added to, and its tokenizer with the adapter's chat template."""
    if mode == "dequantized":
        quant = artifact.record.get("recipe", {}).get("quant", {})
        computed_in = quant.get("compute_dtype", "auto")
        model, tokenizer = load_base(
            info,
            quant="nf4",
            double_quant=quant.get("double_quant", True),
            compute_dtype=computed_in,
            dtype=computed_in,
        )
    else:
        device = auto_device("auto")
        # a narrower type than the stored one would round the weights
        model, tokenizer = load_base(
            info, dtype=torch.promote_types(stored_dtype(info), auto_dtype("auto", device)), device=device
        )
    if template := artifact.record.get("chat_template"):
        tokenizer.chat_template = template["text"]
    return model, tokenizer


def _adapted_logits(
    model: PreTrainedModel, artifact: Artifact, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Tensor]:
    """Logits of the base with the adapter, unmerged; the adapter stays attached."""
    put_on(model, artifact)
    return logits_of(model, tokenizer, texts)


def _written_logits(
    folder: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Tensor]:
    """Logits of the merged model as anyone would load it, in the arithmetic of the model it is compared with."""
    device_map = {"": auto_device("auto")}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device_map, local_files_only=True)
    return logits_of(model.eval(), tokenizer, texts)


def _require(equivalence: Equivalence, dtype: torch.dtype) -> None:
    if not equivalence.holds:
        remedy = "" if dtype == torch.float32 else "; --dtype float32 rounds less"
        raise RunError(
            f"the merged model's logits are {equivalence.relative:.2g} of their size away from those of base and "
            f"adapter, more than the {equivalence.limit:.2g} that rounding to {_name(dtype)} explains: nothing is "
            f"written{remedy}"
        )


def _write_report(path: Path, report: MergeReport, info: BaseInfo) -> None:
    """What travels with the model: no paths of this machine."""
    content = {
        "mode": report.mode,
        "dtype": report.dtype,
        "adapter_uid": report.adapter_uid,
        "base": report.base,
        "base_fingerprint": asdict(info.fingerprint),
        "num_merged": report.num_merged,
        "equivalence": None if report.equivalence is None else asdict(report.equivalence),
        "peftkit_version": version("peftkit"),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
