"""All that comes before the first step, and nothing after it: what would be trained, on what, in how much memory."""

from dataclasses import dataclass

from peftkit.data import Stream
from peftkit.data.audit import Piece, pieces
from peftkit.methods import detach
from peftkit.recipe import Recipe, Runs
from peftkit.train.fit import estimate, why_not
from peftkit.train.loop import num_steps
from peftkit.train.memory import MemoryEstimate, available_memory, num_base, num_trainable
from peftkit.train.prepare import Prepared, adapt, load
from peftkit.train.run import check_export


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    out: str
    """The recipe's."""
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
    memory_available: int
    """Bytes that this process may hold on its device, what it holds already among them."""
    recompute: str
    """What the backward pass computes a second time: none, selective, full or offload."""
    wont_fit: str | None
    """That the memory doesn't suffice and the smallest change with which it would; None where it does."""
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
    (plan,) = dry_runs(Runs((recipe,)))
    return plan


def dry_runs(runs: Runs) -> list[DryRun]:
    """The same of several runs on one base."""
    resident, rows = load(runs.recipes)
    plans = []
    for recipe, data in zip(runs.recipes, rows, strict=True):
        plans.append(_plan(adapt(resident, recipe, data)))
        detach(resident.model)
    return plans


def _plan(prepared: Prepared) -> DryRun:
    recipe = prepared.recipe
    check_export(prepared)
    model = prepared.model
    memory, available = estimate(prepared), available_memory(model.device)
    train = prepared.train.head if isinstance(prepared.train, Stream) else prepared.train
    sample = train.samples[0]
    padding, unpacked = prepared.padding()
    return DryRun(
        out=recipe.out,
        base=prepared.base.name,
        trainable_parameters=num_trainable(model),
        base_parameters=num_base(model),
        steps=recipe.train.max_steps or num_steps(prepared.sampler(), recipe.train.epochs),
        train=prepared.train.facts(),
        valid=prepared.valid.facts() if prepared.valid else None,
        memory=memory,
        memory_total=memory.total,
        memory_available=available,
        recompute=str(prepared.recompute),
        wont_fit=why_not(prepared, memory, available),
        packed=prepared.packed,
        padding=padding if prepared.packed else unpacked,
        unpacked_padding=unpacked,
        sample=list(pieces(sample, prepared.tokenizer)),
        sample_where=sample.where,
    )
