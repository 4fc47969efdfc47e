"""Merging: an adapter put into its base's weights, with proof that the result computes the same.

The package is callable, because `peftkit.merge(model, ["runs/a"])` and `peftkit.merge` the package share one name.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from transformers import PreTrainedModel

from peftkit.merge.adapter import export_adapters, export_gguf, export_peft, named_base, transformers_name
from peftkit.merge.check import Check, check
from peftkit.merge.compose import Composition, Method, Weight, compose, compose_to_folder
from peftkit.merge.diff import ModuleDiff, by_layer, diff
from peftkit.merge.equivalence import Equivalence
from peftkit.merge.export import Format, MergeReport, merge_to_folder
from peftkit.merge.model import merge, mergeable
from peftkit.merge.weights import Mode

__all__ = [
    "merge",
    "merge_to_folder",
    "mergeable",
    "check",
    "Check",
    "compose",
    "compose_to_folder",
    "Composition",
    "Method",
    "Weight",
    "diff",
    "by_layer",
    "ModuleDiff",
    "MergeReport",
    "Mode",
    "Format",
    "Equivalence",
    "export_adapters",
    "export_gguf",
    "export_peft",
    "named_base",
    "transformers_name",
]


class _Callable(ModuleType):
    def __call__(
        self,
        model: PreTrainedModel,
        adapters: Sequence[str | Path],
        *,
        dtype: str | torch.dtype = "auto",
        weights: Sequence[Weight] | None = None,
        method: Method = "exact",
    ) -> PreTrainedModel:
        return merge(model, adapters, dtype=dtype, weights=weights, method=method)


sys.modules[__name__].__class__ = _Callable
