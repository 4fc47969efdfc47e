"""All that comes before the first step, and nothing after it: what would be trained, on what, in how much memory."""

from dataclasses import dataclass

from peftkit.data import Stream
from peftkit.data.audit import Piece, pieces
from peftkit.recipe import Recipe
from peftkit.train.loop import num_steps
from peftkit.train.memory import MemoryEstimate, estimate_memory, num_base, num_trainable
from peftkit.train.prepare import prepare, virtual_tokens


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    base: str
    trainable_parameters: int
    base_parameters: int
    """Parameters of the base."""
    steps: int
    train: dict[str, str | int]
    """Path, hash, rows, tokens, target tokens, truncated rows."""
    valid: dict[str, str | int] | None
    memory: MemoryEstimate
    memory_total: int
    """Bytes of all parts."""
    packed: bool
    """Rows are laid end to end."""
    padding: float
    """Share of the computed positions that is padding."""
    unpacked_padding: float
    """What it is without packing."""
    sample: list[Piece]
    """The first row, decoded, cut where training begins and ends."""
    sample_where: str


def dry_run(recipe: Recipe) -> DryRun:
    """Reads the data, loads the base, attaches the adapter and reports; writes nothing. Raises what `train` would."""
    prepared = prepare(recipe)
    model = prepared.model
    memory = estimate_memory(
        model,
        batch_shapes=[(shape.rows, shape.length, shape.targets) for shape in prepared.sampler().shapes()],
        virtual_tokens=virtual_tokens(recipe),
        gradient_checkpointing=recipe.train.gradient_checkpointing,
    )
    train = prepared.train.head if isinstance(prepared.train, Stream) else prepared.train
    sample = train.samples[0]
    padding, unpacked = prepared.padding()
    return DryRun(
        base=prepared.base.name,
        trainable_parameters=num_trainable(model),
        base_parameters=num_base(model),
        steps=recipe.train.max_steps or num_steps(prepared.sampler(), recipe.train.epochs),
        train=prepared.train.facts(),
        valid=prepared.valid.facts() if prepared.valid else None,
        memory=memory,
        memory_total=memory.total,
        packed=prepared.packed,
        padding=padding if prepared.packed else unpacked,
        unpacked_padding=unpacked,
        sample=list(pieces(sample, prepared.tokenizer)),
        sample_where=sample.where,
    )
