"""How two LoRAs differ: how large their changes are, and whether they act in the same directions.

The overlap of two subspaces with orthonormal bases U (n, r) and V (n, s) is ‖Uᵀ V‖² / min(r, s): 1 when the smaller
lies in the larger, 0 when they are orthogonal (Hu et al. 2021, arXiv:2106.09685, §7.2).
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from peftkit.artifact import Artifact
from peftkit.errors import AdapterError
from peftkit.merge.factors import Factors, factors_of

_NEGLIGIBLE = 1e-6
"""Singular values below this share of the largest are rounding."""
_LAYER = re.compile(r"\blayers\.\d+\b")


@dataclass(frozen=True, slots=True)
class ModuleDiff:
    """Two adapters at one module, or over the modules of a layer."""

    name: str
    norm_a: float
    """‖ΔW‖ of the first; 0 where it leaves the module alone."""
    norm_b: float
    cosine: float | None
    """Of the two changes as vectors; None where one of them is nothing."""
    overlap_in: float | None
    """Of the input directions that they read; of a layer, the mean over its modules."""
    overlap_out: float | None
    """Of the output directions that they write to."""


def diff(a: Artifact, b: Artifact) -> list[ModuleDiff]:
    """Compares two LoRAs module by module.

    Raises UnsupportedError for what isn't a sum of low-rank updates, AdapterError for adapters of different shapes.
    """
    first, second = factors_of(a), factors_of(b)
    return [
        _module(path, first.get(path), second.get(path)) for path in sorted(first.keys() | second.keys(), key=_order)
    ]


def by_layer(modules: Iterable[ModuleDiff]) -> list[ModuleDiff]:
    """The same by decoder layer; the ends of the model are by themselves."""
    layers: dict[str, list[ModuleDiff]] = {}
    for module in modules:
        found = _LAYER.search(module.name)
        layers.setdefault(found.group() if found else module.name, []).append(module)
    return [_layer(name, members) for name, members in layers.items()]


def _module(path: str, a: Factors | None, b: Factors | None) -> ModuleDiff:
    if a is not None and b is not None and a.shape != b.shape:
        raise AdapterError(f"{path} has the shapes {list(a.shape)} and {list(b.shape)}: these are of different bases")
    sides = [None if one is None else _trimmed(one) for one in (a, b)]
    norm_a, norm_b = (0.0 if side is None else side[1].norm().item() for side in sides)
    left, right = sides
    if left is None or right is None or 0.0 in (norm_a, norm_b):
        return ModuleDiff(path, norm_a, norm_b, None, None, None)
    (U, S, Vh), (X, T, Yh) = left, right
    inner = ((S[:, None] * (U.T @ X) * T) * (Vh @ Yh.T)).sum().item()
    cosine = inner / (norm_a * norm_b)
    return ModuleDiff(path, norm_a, norm_b, cosine, _overlap(Vh.T, Yh.T), _overlap(U, X))


def _trimmed(factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    U, S, Vh = factors.svd()
    kept = S > _NEGLIGIBLE * S.max()
    return U[:, kept], S[kept], Vh[kept]


def _overlap(U: Tensor, V: Tensor) -> float:
    return (torch.linalg.matrix_norm(U.T @ V).square() / min(U.shape[1], V.shape[1])).item()


def _layer(name: str, members: list[ModuleDiff]) -> ModuleDiff:
    norm_a, norm_b = math.hypot(*(one.norm_a for one in members)), math.hypot(*(one.norm_b for one in members))
    inner = sum((one.cosine or 0.0) * one.norm_a * one.norm_b for one in members)
    both = [one for one in members if one.cosine is not None]
    cosine = inner / (norm_a * norm_b) if both else None
    return ModuleDiff(
        name, norm_a, norm_b, cosine, _mean([one.overlap_in for one in both]), _mean([one.overlap_out for one in both])
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _order(path: str) -> tuple[int, str]:
    found = re.search(r"\blayers\.(\d+)\b", path)
    return (int(found[1]) if found else -1, path)
