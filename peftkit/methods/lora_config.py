"""The settings of LoRA, and which of a model's modules they come to.

Modules are named by their path in the model, parameters by path and `.weight` or `.bias`. Names match as in HF PEFT: a
list's name is a whole path or its end after a dot, a string is a regular expression for whole paths.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator, Field, model_validator

from peftkit.errors import InputError, did_you_mean
from peftkit.methods.method import (
    MAX_RANK,
    MAX_STRENGTH,
    MethodSettings,
    fullmatch,
    match_names,
    match_regex,
    matches,
    matrices,
)

PREFIX = "base_model.model."
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
ENDS = (EMBEDDING, HEAD)
"""The modules outside the decoder layers that an adapter may name; in a tied base they share one weight."""

_LAYER = regex.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")


def _regular_expression(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error
    return pattern


def _distinct(ids: list[int]) -> list[int]:
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0:
        raise ValueError("token ids must be given, each once, and none below 0")
    return ids


Pattern = Annotated[str, AfterValidator(_regular_expression)]
TokenIds = Annotated[list[int], AfterValidator(_distinct)]


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One adapted layer. An embedding is one of the tokens' unit vectors: out its width, in its vocabulary."""

    r: int
    scale: float
    out_features: int
    in_features: int
    embedding: bool = False


class LoraConfig(MethodSettings):
    """Settings of LoRA; the names at the file boundary are HF PEFT's (`lora_alpha`, `target_modules`, …)."""

    kind: Literal["lora"] = "lora"
    r: int = Field(default=16, ge=1, le=MAX_RANK)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0, le=MAX_STRENGTH)
    """Strength of the update: it is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the update's inputs dropped in training; an embedding's are never dropped."""
    targets: str | list[str] = "all-linear"
    """Layers to adapt: "all-linear" (all but the output embedding), a list of names, or a regular expression."""
    exclude: str | list[str] = Field(default_factory=list)
    """Layers to leave out: a list of names or a regular expression."""
    layers_to_transform: list[int] | None = None
    """Indices of the decoder layers to adapt; null adapts all."""
    rank_pattern: dict[Pattern, Annotated[int, Field(ge=1, le=MAX_RANK)]] = Field(default_factory=dict)
    """Name or regular expression → rank; the first that matches wins."""
    alpha_pattern: dict[Pattern, Annotated[float, Field(ge=-MAX_STRENGTH, le=MAX_STRENGTH)]] = Field(
        default_factory=dict
    )
    """Name or regular expression → alpha; the first that matches wins."""
    variant: Literal["plain", "rslora", "dora"] = "plain"
    """rslora scales by alpha / √r; dora also learns a magnitude for each output."""
    init: Literal["default", "pissa", "loftq"] = "default"
    """Start from nothing, from the weights' principal part (pissa), or from what NF4 rounded away (loftq)."""
    lr_ratio: float = Field(default=1.0, gt=0)
    """LoRA+: learning rate of B over that of A, which is optim.lr."""
    lora_bias: bool = False
    """Also learn a bias beside B, scaled as the update is."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Modules to train whole, as copies: every one with a weight whose path ends so."""
    trainable_token_indices: TokenIds | dict[str, TokenIds] | None = None
    """Tokens whose embeddings are trained, or such a list for each of embed_tokens and lm_head."""

    @model_validator(mode="after")
    def _bias_goes_without_magnitudes(self) -> "LoraConfig":
        if self.lora_bias and self.variant == "dora":
            raise ValueError("lora_bias can't be combined with variant dora")
        return self

    @property
    def max_rank(self) -> int:
        """The largest rank of any layer."""
        return max([self.r, *self.rank_pattern.values()])

    def resolve(self, shapes: Mapping[str, tuple[int, ...]], *, partial: bool = False) -> dict[str, LoraSite]:
        """The layers that this config adapts, among modules whose weights have the given shapes.

        A linear layer's is (out, in), an embedding's (tokens, width). Raises InputError for a name, pattern or layer
        index that matches nothing. With `partial` the modules are the adapted ones alone, so that what is left out
        can't be among them.
        """
        paths = self._targeted(shapes, partial)
        for field in ("rank_pattern", "alpha_pattern"):
            for key in getattr(self, field):
                if not any(_hits(key, path, field) for path in paths):
                    names = {path.rsplit(".", 1)[-1] for path in paths}
                    raise InputError(
                        f"{field}: '{key}' matches no adapted layer{did_you_mean(key, names)}", field=field
                    )
        if self.lora_bias and EMBEDDING in paths:
            raise InputError("lora_bias: an embedding has none: leave embed_tokens out of targets", field="lora_bias")
        return {path: self._site(path, shapes[path]) for path in sorted(paths)}

    def saved(self, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
        """Path of each module that is trained whole → its parameters' own names.

        `parameters` are the model's by full name. Raises InputError for a name that matches no module with a weight.
        """
        paths = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
        found: set[str] = set()
        for name in self.modules_to_save:
            hit = {path for path in paths if name and path.endswith(name)}  # HF PEFT's rule here, without a dot
            if not hit:
                known = {path.rsplit(".", 1)[-1] for path in paths}
                raise InputError(
                    f"modules_to_save: '{name}' names no module that has a weight{did_you_mean(name, known)}",
                    field="modules_to_save",
                )
            found |= hit
        return {path: [name for name in ("weight", "bias") if f"{path}.{name}" in parameters] for path in sorted(found)}

    def token_rows(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> dict[str, list[int]]:
        """Path of each embedding some of whose rows are trained → token ids, in the order of the rows.

        In a tied base the output embedding follows the input embedding unless it has ids of its own. Raises InputError
        for another name or an id outside the vocabulary.
        """
        field, given = "trainable_token_indices", self.trainable_token_indices
        named = {EMBEDDING.rsplit(".", 1)[-1]: given} if isinstance(given, list) else given or {}
        rows: dict[str, list[int]] = {}
        for name, ids in named.items():
            path = next((path for path in ENDS if matches(path, name)), None)
            if path is None or path not in shapes:
                hint = "" if path else did_you_mean(name, [end.rsplit(".", 1)[-1] for end in ENDS])
                raise InputError(f"{field}: '{name}' is no embedding of this model{hint}", field=field)
            if max(ids) >= shapes[path][0]:
                raise InputError(
                    f"{field}: there is no token {max(ids)}, the vocabulary has {shapes[path][0]}", field=field
                )
            rows[path] = ids
        if tied and rows.get(HEAD) == rows.get(EMBEDDING):
            rows.pop(HEAD, None)
        return rows

    def expected_tensors(
        self, parameters: Mapping[str, tuple[int, ...]], *, tied: bool, partial: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """PEFT key → shape of the tensors of an adapter with this config on a base with the given parameters, which
        with `partial` are those of adapted modules alone."""
        shapes = matrices(parameters)
        sites, saved = self.resolve(shapes, partial=partial), self.saved(parameters)
        rows = self.token_rows(shapes, tied=tied)
        self.check_apart(sites, saved, rows, tied=tied)
        expected: dict[str, tuple[int, ...]] = {}
        for path, site in sites.items():
            expected |= {f"{PREFIX}{path}.{name}": shape for name, shape in self._site_tensors(site).items()}
        for path, names in saved.items():
            expected |= {f"{PREFIX}{path}.{name}": parameters[f"{path}.{name}"] for name in names}
        for path, ids in rows.items():
            expected[f"{PREFIX}{path}.token_adapter.trainable_tokens_delta"] = (len(ids), shapes[path][1])
        return expected

    def check_apart(
        self,
        sites: Mapping[str, LoraSite],
        saved: Mapping[str, list[str]],
        rows: Mapping[str, list[int]],
        *,
        tied: bool,
    ) -> None:
        """Raises InputError for a module that is changed in two ways."""
        followers = {HEAD} if tied and EMBEDDING in rows else set[str]()
        for field, paths, others in (
            ("modules_to_save", set(saved), set(sites)),
            ("trainable_token_indices", set(rows) | followers, set(sites) | set(saved)),
        ):
            if both := sorted(paths & others):
                raise InputError(f"{field}: {both[0]} is changed in another way already", field=field)

    def identity(self) -> dict[str, Any]:
        def ordered(names: str | list[str]) -> str | list[str]:
            return names if isinstance(names, str) else sorted(set(names))

        identity: dict[str, Any] = {
            "kind": self.kind,
            "r": self.r,
            "alpha": self.alpha,
            "targets": ordered(self.targets),
            "exclude": ordered(self.exclude),
            "layers_to_transform": None if self.layers_to_transform is None else sorted(set(self.layers_to_transform)),
            "rank_pattern": list(self.rank_pattern.items()),
            "alpha_pattern": list(self.alpha_pattern.items()),
            "variant": self.variant,
        }
        # named only where they are used: the identity of all other adapters is older than they are
        if self.lora_bias:
            identity["lora_bias"] = True
        if self.modules_to_save:
            identity["modules_to_save"] = ordered(self.modules_to_save)
        if self.trainable_token_indices:
            identity["trainable_token_indices"] = self.trainable_token_indices
        return identity

    def _site_tensors(self, site: LoraSite) -> dict[str, tuple[int, ...]]:
        names = ("lora_embedding_A", "lora_embedding_B") if site.embedding else ("lora_A.weight", "lora_B.weight")
        shapes: dict[str, tuple[int, ...]] = {
            names[0]: (site.r, site.in_features),
            names[1]: (site.out_features, site.r),
        }
        if self.lora_bias:
            shapes["lora_B.bias"] = (site.out_features,)
        if self.variant == "dora":
            shapes["lora_magnitude_vector"] = (site.out_features,)
        return shapes

    def _targeted(self, shapes: Mapping[str, tuple[int, ...]], partial: bool) -> set[str]:
        candidates = [path for path in shapes if _LAYER.search(path) or path in ENDS]
        if self.layers_to_transform is not None:
            candidates = self._in_layers(candidates, partial)
        if isinstance(self.targets, list):
            if not self.targets:
                raise InputError("targets is empty: name the layers to adapt, or write all-linear", field="targets")
            paths = match_names(self.targets, candidates, "targets", partial=partial and bool(self.exclude))
        elif self.targets.lower() == "all-linear":
            paths = {path for path in candidates if path not in ENDS}
        else:
            paths = match_regex(self.targets, candidates, "targets")
        if self.exclude:
            match = match_names if isinstance(self.exclude, list) else match_regex
            paths -= match(self.exclude, candidates, "exclude", partial=partial)  # type: ignore[arg-type]
        if not paths:
            raise InputError("targets and exclude leave no layer to adapt", field="targets")
        return paths

    def _in_layers(self, paths: list[str], partial: bool) -> list[str]:
        assert self.layers_to_transform is not None
        by_layer = {path: int(found.group(1)) for path in paths if (found := _LAYER.search(path))}
        for index in self.layers_to_transform:
            if index not in by_layer.values() and not partial:
                last = max(by_layer.values(), default=-1)
                raise InputError(
                    f"layers_to_transform: there is no layer {index}, this model has 0 to {last}",
                    field="layers_to_transform",
                )
        return [path for path, index in by_layer.items() if index in self.layers_to_transform]

    def _site(self, path: str, shape: tuple[int, ...]) -> LoraSite:
        ranks, alphas = self.rank_pattern.items(), self.alpha_pattern.items()
        r = next((rank for key, rank in ranks if _hits(key, path, "rank_pattern")), self.r)
        alpha = next((value for key, value in alphas if _hits(key, path, "alpha_pattern")), self.alpha)
        scale = alpha / (math.sqrt(r) if self.variant == "rslora" else r)
        is_embedding = path == EMBEDDING
        out_features, in_features = (shape[1], shape[0]) if is_embedding else shape
        return LoraSite(r, scale, out_features, in_features, is_embedding)


def _hits(key: str, path: str, field: str) -> bool:
    """HF PEFT's rule for the keys of rank_pattern and alpha_pattern."""
    return fullmatch(rf"(.*\.)?({key})", path, field)
