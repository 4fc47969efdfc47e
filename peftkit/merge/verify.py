"""The logits of what a folder holds: a model, a GGUF file, or an adapter over its base."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from peftkit.artifact import Artifact, put_on
from peftkit.base import BaseInfo, auto_device, auto_dtype, load_base
from peftkit.base.load import compute_as_asked
from peftkit.merge.equivalence import logits_of
from peftkit.merge.weights import Mode


def load_for(
    info: BaseInfo, mode: Mode, artifact: Artifact, stored: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base with the weights that the adapter is added to, and its tokenizer with the adapter's chat template.

    `stored` is the type that the base's folder holds.
    """
    if mode == "original":
        device = auto_device("auto")
        # a narrower type than the stored one would round the weights
        model, tokenizer = load_base(info, dtype=torch.promote_types(stored, auto_dtype("auto", device)), device=device)
    else:
        quant = artifact.record.get("recipe", {}).get("quant", {})
        computed_in = quant.get("compute_dtype", "auto")
        model, tokenizer = load_base(
            info,
            quant="nf4",
            double_quant=quant.get("double_quant", True),
            compute_dtype=computed_in,
            dtype=computed_in,
        )
    if template := artifact.record.get("chat_template"):
        tokenizer.chat_template = template["text"]
    return model, tokenizer


def adapted_logits(
    model: PreTrainedModel, artifact: Artifact, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Tensor]:
    """Logits of the base with the adapter, unmerged; the adapter stays attached."""
    put_on(model, artifact)
    return logits_of(model, tokenizer, texts)


def written_logits(
    folder: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Tensor]:
    """Logits of a model as anyone would load it, in the arithmetic of the model it is compared with.

    `folder` is one of the HF layout, or holds one GGUF file.
    """
    settings: dict[str, Any] = {"dtype": dtype, "device_map": {"": auto_device("auto")}, "local_files_only": True}
    if gguf := next(folder.glob("*.gguf"), None):
        settings["gguf_file"] = gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    compute_as_asked(model)
    return logits_of(model.eval(), tokenizer, texts)
