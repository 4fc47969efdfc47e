"""All that comes before the first step, and nothing after it: what would be trained, on what, in how much memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from peftkit.data import Dataset, Sample
from peftkit.recipe import Recipe
from peftkit.train.memory import MemoryEstimate, estimate_memory, num_base, num_trainable
from peftkit.train.prepare import Prepared, prepare, virtual_tokens


@dataclass(frozen=True)
class Piece:
    """A run of tokens that are all trained or all not."""

    text: str
    trained: bool


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
    sample: list[Piece]
    """The first row, decoded, cut where training begins and ends."""
    sample_where: str


def dry_run(recipe: Recipe) -> DryRun:
    """Reads the data, loads the base, attaches the adapter and reports; writes nothing. Raises what `train` would."""
    prepared = prepare(recipe)
    model = prepared.model
    memory = estimate_memory(
        model,
        batch_shapes=list(_batch_shapes(prepared)),
        virtual_tokens=virtual_tokens(recipe),
        gradient_checkpointing=recipe.train.gradient_checkpointing,
    )
    sample = prepared.train.samples[0]
    return DryRun(
        base=prepared.base.name,
        trainable_parameters=num_trainable(model),
        base_parameters=num_base(model),
        steps=recipe.train.max_steps or prepared.sampler().num_windows(recipe.train.epochs),
        train=prepared.train.facts(),
        valid=prepared.valid.facts() if prepared.valid else None,
        memory=memory,
        memory_total=memory.total,
        sample=list(pieces(sample, prepared.tokenizer)),
        sample_where=sample.where,
    )


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A sample's text in runs of trained and untrained tokens, special tokens shown."""
    tokens = zip(sample.ids.tolist(), sample.trained.tolist(), strict=True)
    for trained, run in groupby(tokens, key=lambda token: token[1]):
        yield Piece(str(tokenizer.decode([token for token, _ in run])), trained)


def _batch_shapes(prepared: Prepared) -> Iterator[tuple[int, int, int]]:
    """(rows, padded length, target tokens) of the micro-batches of the first epoch."""
    data: Dataset = prepared.train
    for batch in prepared.sampler().plan:
        targets = sum(int(data.samples[row].trained.sum()) for row in batch)
        yield len(batch), max(data.lengths[row] for row in batch), targets
