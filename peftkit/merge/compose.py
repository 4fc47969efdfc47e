"""Several LoRAs → one, composed of the changes that they make and not of their factors.

With ΔWᵢ = sᵢ Bᵢ Aᵢ and weights wᵢ, which may differ by layer and may be negative, for each module

    exact         Σ wᵢ ΔWᵢ                       as A = [A₁; A₂; …], B = [w₁s₁B₁ | w₂s₂B₂ | …]: ranks add up
    svd           its best approximation of a given rank
    ties          trim each ΔWᵢ to its largest entries, elect each entry's sign by the weighted sum, and take the mean
                  of those wᵢ ΔWᵢ that agree with it                          Yadav et al. 2023, arXiv:2306.01708
    dare_linear   drop entries of each ΔWᵢ at random, scale the others up, add    Yu et al. 2024, arXiv:2311.03099
    dare_ties     drop so, then elect and average as ties does

The last three aren't of low rank: they are written as their best approximation of a given rank, and the share of the
norm² that it keeps is reported. Averaging A and B apart, as is often done, gives another sum altogether.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peftkit.artifact import Artifact, Part, read_adapter, uid_of, write_adapter
from peftkit.errors import AdapterError, BaseMismatchError, InputError
from peftkit.merge.factors import Factors, factors_of
from peftkit.merge.folder import check_room, check_target, new_folder
from peftkit.methods import LoraConfig
from peftkit.methods.lora import PREFIX
from peftkit.methods.lora_init import principal
from peftkit.methods.lora_layers import LoraEmbedding, LoraLinear

logger = logging.getLogger(__name__)

Method = Literal["exact", "svd", "ties", "dare_linear", "dare_ties"]
Weight = float | Sequence[float]
"""Of one adapter: a number, or one for each decoder layer."""

DENSITY = {"ties": 0.5, "dare_linear": 0.5, "dare_ties": 0.5}
"""Share of entries kept unless told otherwise: of 0.2, 0.5 and 0.8 none is better for both tasks of docs/merging.md."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Composition:
    """A composed adapter, and how much of the sought change it holds."""

    artifact: Artifact
    """Not on disk yet, unless it is one of the adapters itself."""
    kept: float
    """Share of the sought changes' norm², over all modules, that the rank has room for; 1 for exact."""


def compose(
    adapters: Sequence[Artifact],
    weights: Sequence[Weight] | None = None,
    *,
    method: Method = "exact",
    rank: int | None = None,
    density: float | None = None,
    seed: int = 0,
) -> Composition:
    """Composes LoRAs of one base; `weights` are 1 unless given.

    `rank` is that of the result: by default the largest of theirs for svd and the sum of theirs otherwise. `density` is
    the share of entries that ties and dare keep; `seed` fixes what dare drops. Adapters of weight 0 take no part, so
    that weights (1, 0) give the first adapter itself by every method, unless a rank or density is asked for.

    Raises UnsupportedError for DoRA, biases, whole modules and token rows, which have no exact sum, AdapterError or
    BaseMismatchError for adapters that don't fit together, InputError for settings that contradict each other.
    """
    given = [1.0] * len(adapters) if weights is None else list(weights)
    _check_settings(len(adapters), given, method, rank, density)
    used = [(adapter, weight) for adapter, weight in zip(adapters, given, strict=True) if _counts(weight)]
    if not used:
        raise InputError("weights: all are 0, which leaves nothing to write", field="weights")
    if len(used) == 1 and used[0][1] == 1 and rank is None and density is None:
        return Composition(used[0][0], 1.0)
    _check_bases([adapter for adapter, _ in used])
    by_adapter = [(factors_of(adapter), weight) for adapter, weight in used]
    num_layers = _num_layers(adapters, [factors for factors, _ in by_adapter])
    generator = torch.Generator().manual_seed(seed)
    composed: dict[str, Factors] = {}
    kept = whole = 0.0
    for path in sorted({path for factors, _ in by_adapter for path in factors}):
        terms = [(factors[path], _at(weight, path, num_layers)) for factors, weight in by_adapter if path in factors]
        _check_shapes(path, [term for term, _ in terms])
        result, energy, lost = _composed(terms, method, rank, density, generator)
        composed[path] = result
        kept, whole = kept + energy - lost, whole + energy
    config, tensors = _adapter(composed)
    if broken := next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None):
        raise InputError(f"weights: too large, {broken} comes out with values that aren't finite", field="weights")
    record = _record(used, method, density, seed)
    artifact = Artifact(Path("composed"), (Part(config, tensors),), uid_of(config, tensors), record)
    return Composition(artifact, kept / whole if whole > 0 else 1.0)


def compose_to_folder(
    adapters: Sequence[str | Path], out: str | Path, weights: Sequence[Weight] | None = None, **settings: Any
) -> Composition:
    """`compose` for adapter folders, written as the new adapter folder `out`.

    Raises also InputError when `out` is taken, RunError when there is no room.
    """
    out = Path(out)
    check_target(out)
    found = compose([read_adapter(adapter) for adapter in adapters], weights, **settings)
    made = found.artifact
    check_room(out, sum(tensor.nbytes for tensor in made.tensors.values()))
    with new_folder(out) as staging:
        write_adapter(staging, made.config, made.tensors, made.record)
    return Composition(read_adapter(out), found.kept)


def _check_settings(
    num_adapters: int, weights: Sequence[Weight], method: Method, rank: int | None, density: float | None
) -> None:
    if not num_adapters:
        raise InputError("no adapters are given", field="adapters")
    if len(weights) != num_adapters:
        raise InputError(f"weights: {len(weights)} for {num_adapters} adapters", field="weights")
    if any(isinstance(weight, Sequence) and not weight for weight in weights):
        raise InputError("weights: an adapter has an empty list: give a number for each layer", field="weights")
    numbers = [n for weight in weights for n in (weight if isinstance(weight, Sequence) else [weight])]
    if not torch.isfinite(torch.tensor(numbers)).all():
        raise InputError("weights: must be finite numbers", field="weights")
    if density is not None and method not in DENSITY:
        raise InputError(f"density: {method} keeps every entry: it goes with {', '.join(DENSITY)}", field="density")
    if density is not None and not 0 < density <= 1:
        raise InputError(f"density {density}: must be above 0 and at most 1", field="density")
    if rank is not None and method == "exact":
        raise InputError("rank: exact has the sum of the adapters' ranks: use method svd for another", field="rank")
    if rank is not None and rank < 1:
        raise InputError(f"rank {rank}: must be at least 1", field="rank")


def _counts(weight: Weight) -> bool:
    return any(weight) if isinstance(weight, Sequence) else weight != 0


def _check_bases(adapters: Sequence[Artifact]) -> None:
    """The adapters' records, as far as they speak of it, must name one base."""
    named = [(adapter.path, (adapter.record.get("base") or {}).get("fingerprint")) for adapter in adapters]
    known = [(path, fingerprint) for path, fingerprint in named if fingerprint]
    for path, fingerprint in known[1:]:
        first_path, first = known[0]
        for part in ("architecture", "config", "tokenizer"):
            if fingerprint.get(part) != first.get(part):
                raise BaseMismatchError(f"{path} and {first_path} were made for different bases: their {part} differs")
        if fingerprint.get("weights") != first.get("weights"):
            logger.warning("%s and %s were made for bases with different weights", path, first_path)


def _num_layers(adapters: Sequence[Artifact], factors: Sequence[Mapping[str, Factors]]) -> int:
    recorded = [(adapter.record.get("base") or {}).get("layers") for adapter in adapters]
    seen = [int(found[1]) + 1 for paths in factors for path in paths if (found := _LAYER.search(path))]
    return max([layers for layers in recorded if isinstance(layers, int)] + seen, default=0)


def _at(weight: Weight, path: str, num_layers: int) -> float:
    """An adapter's weight at a module."""
    if not isinstance(weight, Sequence):
        return weight
    if len(weight) != num_layers:
        raise InputError(f"weights: {len(weight)} layers' weights for a base of {num_layers} layers", field="weights")
    found = _LAYER.search(path)
    if found is None:
        raise InputError(f"weights: {path} lies in no layer: give this adapter one weight", field="weights")
    return weight[int(found[1])]


def _check_shapes(path: str, terms: Sequence[Factors]) -> None:
    shapes = {term.shape for term in terms}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise AdapterError(f"{path} has the shapes {listed}: the adapters are for different bases")


def _composed(
    terms: Sequence[tuple[Factors, float]],
    method: Method,
    rank: int | None,
    density: float | None,
    generator: torch.Generator,
) -> tuple[Factors, float, float]:
    """One module's composed update, the norm² of the sought change, and of what its rank has no room for."""
    stacked = Factors(
        torch.cat([term.A for term, _ in terms]),
        torch.cat([term.B * weight for term, weight in terms], dim=1),
        terms[0][0].embedding,
    )
    if method == "exact":
        return stacked, 1.0, 0.0
    if method == "svd":
        U, S, Vh = stacked.svd()
        r = min(rank or max(len(term.A) for term, _ in terms), len(S))
        root = S[:r].sqrt()
        result = Factors((root[:, None] * Vh[:r]).float(), (U[:, :r] * root).float(), stacked.embedding)
        return result, S.square().sum().item(), S[r:].square().sum().item()
    sought = _sparse([(term.dense(), weight) for term, weight in terms], method, density or DENSITY[method], generator)
    r = min(rank or len(stacked.A), *sought.shape)
    A, B = principal(sought, r, 1.0, torch.Generator().manual_seed(0))  # its draws change nothing but rounding
    lost = (sought - B @ A).square().sum().item()
    return Factors(A, B, stacked.embedding), sought.square().sum().item(), lost


def _sparse(
    changes: Sequence[tuple[Tensor, float]], method: Method, density: float, generator: torch.Generator
) -> Tensor:
    """The dense change that ties or dare seek; each change (out, in) comes with its weight."""
    prune = _largest if method == "ties" else _dropped
    weighted = torch.stack([prune(change, density, generator) * weight for change, weight in changes])
    if method == "dare_linear":
        return weighted.sum(0)
    elected = torch.where(weighted.sum(0) >= 0, 1.0, -1.0)
    agrees = weighted.sign() == elected
    return (weighted * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def _largest(change: Tensor, density: float, _: torch.Generator) -> Tensor:
    """The largest entries by magnitude, the others 0."""
    flat = change.flatten()
    kept = torch.zeros_like(flat)
    places = flat.abs().topk(max(1, int(density * len(flat)))).indices
    kept[places] = flat[places]
    return kept.view_as(change)


def _dropped(change: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """Entries kept at random, scaled up so that the expectation stays."""
    return change * (torch.rand(change.shape, generator=generator) < density) / density


def _adapter(composed: Mapping[str, Factors]) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Config and tensors of an adapter whose every scale is 1."""
    ranks = {path: len(factors.A) for path, factors in composed.items()}
    r = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != r}
    config = LoraConfig(
        r=r,
        alpha=r,
        targets=sorted(composed),
        rank_pattern=others,
        alpha_pattern={path: float(rank) for path, rank in others.items()},
    )
    tensors: dict[str, Tensor] = {}
    for path, factors in composed.items():
        layer = LoraEmbedding if factors.embedding else LoraLinear
        tensors[f"{PREFIX}{path}.{layer.NAME_A}"] = factors.A.contiguous()
        tensors[f"{PREFIX}{path}.{layer.NAME_B}"] = factors.B.contiguous()
    return config, tensors


def _record(
    used: Sequence[tuple[Artifact, Weight]], method: Method, density: float | None, seed: int
) -> dict[str, Any]:
    """What is known of the composed adapter: what the adapters' records agree on, and what it is composed of."""
    records = [adapter.record for adapter, _ in used]
    record = {"base": next((record["base"] for record in records if record.get("base")), None)}
    for name in ("quant", "chat_template", "tokenizer_sha256"):
        values = [record.get(name) for record in records]
        if all(value == values[0] for value in values):
            record[name] = values[0]
        else:
            logger.warning("the adapters' %s differs: the composed adapter has none", name)
    composed: dict[str, Any] = {
        "method": method,
        "adapters": [
            {"uid": adapter.uid, "weight": list(weight) if isinstance(weight, Sequence) else weight}
            for adapter, weight in used
        ],
    }
    if method in DENSITY:
        composed["density"] = density or DENSITY[method]
    if method.startswith("dare"):
        composed["seed"] = seed
    return {name: value for name, value in record.items() if value is not None} | {"composed": composed}
