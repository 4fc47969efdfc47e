"""Merging one parameter at a time: what goes in, what comes out, and how much of the change what is written keeps."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from peftkit.merge.delta import Change, merged_weight
from peftkit.merge.weights import EMBEDDING_WEIGHT, HEAD_WEIGHT, BaseWeights, Nf4

_LAYER = re.compile(r"\blayers\.(\d+)\b")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a merged model."""

    name: str
    file: str
    """Name of the file of the base that it comes from."""
    before: Tensor
    """As the mode takes it from the base."""
    after: Tensor
    """Float32 where it is changed, else `before` itself."""


def stays_tied(weights: BaseWeights, changes: Mapping[str, Change], dtype: torch.dtype) -> bool:
    """Whether a tied base's ends come out equal, so that the merged model is tied too."""
    embedding, head = changes.get(EMBEDDING_WEIGHT), changes.get(HEAD_WEIGHT)
    if not weights.tied or embedding is head:
        return weights.tied
    weight = weights.read(EMBEDDING_WEIGHT)
    ends = (merged_weight(EMBEDDING_WEIGHT, weight, change, dtype) for change in (embedding, head))
    return torch.equal(*ends)


def merged_parameters(weights: BaseWeights, changes: Mapping[str, Change], *, tied: bool) -> Iterator[Parameter]:
    """Each parameter of the merged model in the order of the base's files; `tied` is what `stays_tied` said."""
    assert set(changes) <= set(weights.shapes), "every change has its weight"
    for name in weights.names():
        before = weights.read(name)
        yield _changed(name, weights.file_of(name), before, changes.get(name))
        if name == EMBEDDING_WEIGHT and weights.tied and not tied:
            yield _changed(HEAD_WEIGHT, weights.file_of(name), before, changes.get(HEAD_WEIGHT))


def _changed(name: str, file: str, before: Tensor, change: Change | None) -> Parameter:
    return Parameter(name, file, before, before if change is None else change.applied(before.float()))


class Encoding(Protocol):
    """How a merged parameter is held in the folder."""

    def encode(self, parameter: Parameter) -> tuple[dict[str, Tensor], Tensor]:
        """The tensors to write, by name, and what a program that loads them multiplies by."""
        ...


@dataclass(frozen=True, slots=True)
class Cast:
    """As one tensor of a type."""

    dtype: torch.dtype

    def encode(self, parameter: Parameter) -> tuple[dict[str, Tensor], Tensor]:
        cast = merged_weight(parameter.name, parameter.after, None, self.dtype)
        return {parameter.name: cast}, cast


@dataclass(frozen=True, slots=True)
class HeldInNf4:
    """The decoder's linear layers as bitsandbytes writes NF4, all else as one tensor of a type.

    A weight that nothing changes has the bits it had: NF4 of what came out of NF4 has other scales.
    """

    weights: BaseWeights
    nf4: Nf4
    dtype: torch.dtype

    def encode(self, parameter: Parameter) -> tuple[dict[str, Tensor], Tensor]:
        name = parameter.name
        if not self.weights.is_quantized(name):
            return Cast(self.dtype).encode(parameter)
        from bitsandbytes.functional import dequantize_4bit

        is_changed = not torch.equal(parameter.after.float(), parameter.before.float())
        codes, state = self.nf4.quantized(parameter.after if is_changed else self.weights.stored(name))
        parts = {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        return {name: codes, **parts}, dequantize_4bit(codes, state)


@dataclass
class Kept:
    """How much of a change what is written keeps, by layer.

    With D a weight before the merge, Δ the change and M what a program reads back, the share is ⟨M − D, Δ⟩ / ‖Δ‖²,
    over all weights of a layer: 1 for a merge without rounding, 0 for one that wrote the base.
    """

    _sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, before: Tensor, after: Tensor, written: Tensor) -> None:
        """Counts one weight."""
        change = after.float() - before.float()
        found = written.to(before.device).float() - before.float()
        found_layer = _LAYER.search(name)
        sums = self._sums.setdefault(found_layer.group() if found_layer else name.removesuffix(".weight"), [0.0, 0.0])
        sums[0] += torch.sum(found * change, dtype=torch.float64).item()
        sums[1] += torch.sum(change * change, dtype=torch.float64).item()

    def by_layer(self) -> dict[str, float]:
        """Share by layer ("layers.3", "model.embed_tokens"); a layer whose change is nothing isn't there."""
        layers = sorted(self._sums, key=lambda layer: int(found[1]) if (found := _LAYER.search(layer)) else -1)
        return {layer: kept / whole for layer in layers for kept, whole in [self._sums[layer]] if whole > 0}

    @property
    def share(self) -> float:
        """Over all layers; 1 where nothing changes."""
        kept, whole = (sum(sums[i] for sums in self._sums.values()) for i in (0, 1))
        return kept / whole if whole > 0 else 1.0
