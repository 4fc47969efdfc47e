"""Whether a run fits into memory, found before it begins, what it then need not compute twice, and the smallest change
with which it would fit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from peftkit.base.divided import division
from peftkit.errors import InputError
from peftkit.train.adapter_size import BYTES_PER_PARAMETER
from peftkit.train.loss import chunk_rows
from peftkit.train.memory import (
    MemoryEstimate,
    available_memory,
    estimate_memory,
    held_memory,
    num_trainable,
    weight_bytes,
)
from peftkit.train.recompute import Recompute, decoder_layers, set_recompute

if TYPE_CHECKING:  # it chooses by this module
    from peftkit.train.prepare import Prepared

_FILLED = 0.9
"""Share of what is there that is filled by choice: an allocator's blocks leave gaps."""
_NF4_SHARE = 0.52
"""Bytes of a weight in NF4, its share of the scales included."""


def estimate(prepared: "Prepared", layers: int | None = None) -> MemoryEstimate:
    """What a run needs as its model is set; with `layers` what its step would with the first of them alone."""
    return estimate_memory(
        prepared.model,
        prepared.sampler().shapes(),
        packed=prepared.packed,
        moments_8bit=prepared.recipe.optim.name.endswith("8bit"),
        layers=layers,
    )


def choose_recompute(prepared: "Prepared") -> Recompute:
    """The recipe's level on this device: for auto the one that computes least a second time and fits.

    Raises RecipeError for a base that doesn't support the level.
    """
    wanted, model = prepared.recipe.train.gradient_checkpointing, prepared.model
    if wanted not in ("auto", "selective"):
        return Recompute(("full" if wanted else "none") if isinstance(wanted, bool) else wanted)
    can = model.supports_gradient_checkpointing and bool(decoder_layers(model))
    available = available_memory(model.device)
    plenty = 2 * _at_most(prepared) <= available - held_memory(model.device)
    if wanted == "auto" and (plenty or not can):
        return Recompute()
    try:
        set_recompute(model, Recompute("full"))  # which refuses where it can't
        if plenty:
            return Recompute("selective", len(decoder_layers(model)))
        return _least_twice(prepared, int(_FILLED * available), only_selective=wanted == "selective")
    finally:
        set_recompute(model, Recompute())


def _least_twice(prepared: "Prepared", room: int, *, only_selective: bool) -> Recompute:
    """The first level that fits into `room`: by what a few layers take, then by a rehearsal of all."""
    count = len(decoder_layers(prepared.model))
    none, selective = (_Line.of(prepared, Recompute(level), count) for level in ("none", "selective"))
    if not only_selective and none.at(count) <= room and _needs(prepared, Recompute()) <= room:
        return Recompute()
    one = max(none.slope - selective.slope, 1)
    # where the last layer is whole there is no second pass on top of all that is kept, as with none
    whole = min((room - none.start - selective.slope * count) // one, count)
    while whole >= 0:
        over = _needs(prepared, found := Recompute("selective", whole)) - room
        if over <= 0:
            return found
        whole -= -(-over // one)
    if only_selective:
        return Recompute("selective")
    if prepared.model.device.type != "cuda" or _Line.of(prepared, Recompute("full"), count).at(count) <= room:
        return Recompute("full")
    return Recompute("offload")


class _Line(NamedTuple):
    """Bytes of a run by the number of its base's layers, which are taken to be alike."""

    start: int
    slope: int

    @classmethod
    def of(cls, prepared: "Prepared", recompute: Recompute, count: int) -> "_Line":
        """From rehearsals with two and three of `count` layers."""
        most = min(3, count)
        few = max(most - 1, 1)
        fewer, more = (_needs(prepared, recompute, layers) for layers in (few, most))
        slope = (more - fewer) // max(most - few, 1)
        return cls(fewer - few * slope, slope)

    def at(self, layers: int) -> int:
        """Bytes with so many layers."""
        return self.start + self.slope * layers


def _needs(prepared: "Prepared", recompute: Recompute, layers: int | None = None) -> int:
    set_recompute(prepared.model, recompute)
    return estimate(prepared, layers).total


def check_fits(prepared: "Prepared") -> None:
    """Raises InputError for a run that needs more than there is; one that is far from it isn't rehearsed."""
    available = available_memory(prepared.model.device)
    if 2 * _at_most(prepared) > available - held_memory(prepared.model.device):
        reason = why_not(prepared, estimate(prepared), available)
        if reason is not None:
            raise InputError(reason, field="train")


def why_not(prepared: "Prepared", memory: MemoryEstimate, available: int) -> str | None:
    """That a run won't fit, and with what it would; None where it fits."""
    if memory.total <= available:
        return None
    head = f"will not fit: {memory.total / 1e9:.1f} GB are needed and {available / 1e9:.1f} GB are there"
    tried: list[tuple[str, int]] = []
    try:
        for changed in _smaller(prepared):
            set_recompute(changed.model, changed.recompute)
            tried.append((_difference(prepared, changed), estimate(changed).total))
            if tried[-1][1] <= available:
                return f"{head}; it would with {tried[-1][0]}"
    finally:
        set_recompute(prepared.model, prepared.recompute)
    # NF4 changes what is trained on, so it comes last
    for setting, saved in (("train.shard_base=true", _saved_by_dividing), ("quant.kind=nf4", _saved_by_nf4)):
        for difference, needed in tried:
            if needed - saved(prepared) <= available:
                return f"{head}; it would with {' '.join(filter(None, (difference, setting)))}"
    return f"{head}: use a smaller base, a shorter data.max_length or a device with more memory"


def _smaller(prepared: "Prepared") -> Iterator["Prepared"]:
    """The run with smaller micro-batches, more of them in a step, and with checkpointing: the nearest first."""
    train = prepared.recipe.train
    whole = train.batch_tokens if train.batch_size is None else train.batch_size
    name = "batch_tokens" if train.batch_size is None else "batch_size"
    least = prepared.recipe.data.max_length if train.batch_size is None else 1
    least_kept = Recompute("full" if prepared.recompute.level != "offload" else "offload")
    factor = 1
    while factor == 1 or whole // factor >= least:
        settings = {name: whole // factor, "grad_accum": train.grad_accum * factor}
        for recompute in dict.fromkeys((prepared.recompute, least_kept)):
            changed = train.model_copy(update=settings)
            if recompute != prepared.recompute and train.gradient_checkpointing != "auto":
                changed = changed.model_copy(update={"gradient_checkpointing": recompute.level})
            recipe = prepared.recipe.model_copy(update={"train": changed})
            yield replace(prepared, recipe=recipe, recompute=recompute)
        factor *= 2


def _difference(prepared: "Prepared", changed: "Prepared") -> str:
    before, after = prepared.recipe.train.model_dump(), changed.recipe.train.model_dump()
    return " ".join(f"train.{name}={_yaml(after[name])}" for name in before if before[name] != after[name])


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _saved_by_dividing(prepared: "Prepared") -> int:
    """Bytes that are held elsewhere once the base's layers are divided over the processes, two gathered ones apart."""
    count, layers = prepared.accelerator.num_processes, decoder_layers(prepared.model)
    if count == 1 or len(layers) <= 2 or division(prepared.model) is not None:
        return 0
    return max(int(sum(map(weight_bytes, layers)) * (1 - 1 / count - 2 / len(layers))), 0)


def _saved_by_nf4(prepared: "Prepared") -> int:
    """Bytes that NF4 takes off the weights of the layers, of divided ones in the share that is held."""
    if prepared.recipe.quant.kind == "nf4":
        return 0
    divided = division(prepared.model)
    share = 1.0 if divided is None else divided.held_bytes / divided.whole_bytes
    layers = [
        parameter
        for name, parameter in prepared.model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and not parameter.requires_grad
    ]
    return sum(int(share * parameter.numel() * (parameter.element_size() - _NF4_SHARE)) for parameter in layers)


def _at_most(prepared: "Prepared") -> int:
    """More than a run can need, from shapes alone: three times a layer's values for each position, and scores."""
    config, model = prepared.model.config, prepared.model
    shapes = prepared.sampler().shapes()
    positions = max(shape.rows * shape.length for shape in shapes)
    scores = max(shape.rows * shape.length**2 for shape in shapes) * config.num_attention_heads * 4
    layer = 12 * (config.hidden_size + config.intermediate_size) * 4 * positions + scores
    logits = chunk_rows(config.vocab_size) * config.vocab_size * 20
    trained = BYTES_PER_PARAMETER * num_trainable(model)
    return weight_bytes(model) + trained + config.num_hidden_layers * layer + logits
