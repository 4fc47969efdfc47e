"""From a recipe to all that a run works with: encoded data, the base on its device, the adapter attached.

`load` reads every run's data and then the base, which they share; `adapt` puts one run's adapter on it.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.base import BaseInfo, load_base, load_tokenizer, resolve_base
from peftkit.base.divided import division
from peftkit.chat import chat_template_of
from peftkit.data import (
    Batching,
    Dataset,
    Sampler,
    Stream,
    StreamSampler,
    audit,
    check_overlap,
    load_dataset,
    open_stream,
    padding_share,
)
from peftkit.data.packing import why_not
from peftkit.errors import InputError, RecipeError
from peftkit.evaluate import Example, read_examples
from peftkit.methods import attach, attached, fuse
from peftkit.methods.attention import attend_by_bounds
from peftkit.recipe import Data, Recipe
from peftkit.train.adapter_size import check_adapter_fits
from peftkit.train.fit import choose_recompute
from peftkit.train.folder import versions
from peftkit.train.memory import return_freed_memory
from peftkit.train.optim import check_paged
from peftkit.train.processes import check_launch
from peftkit.train.recompute import NOTHING, Recompute, set_recompute

logger = logging.getLogger(__name__)


class Rows(NamedTuple):
    """A run's data, encoded."""

    train: Dataset | Stream
    valid: Dataset | None
    examples: list[Example]
    """Held-out rows to be answered for eval.metric."""
    shown: list[Example]
    """Rows whose answers before and after training are recorded."""


@dataclass(frozen=True)
class Resident:
    """A base in memory, which runs work on one at a time."""

    accelerator: Accelerator
    base: BaseInfo
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prepared:
    """What a run works with."""

    recipe: Recipe
    accelerator: Accelerator
    base: BaseInfo
    model: PreTrainedModel
    """In train mode, its adapter attached; only adapter parameters require grad."""
    tokenizer: PreTrainedTokenizerBase
    train: Dataset | Stream
    valid: Dataset | None
    examples: list[Example]
    """Held-out rows to be answered for eval.metric."""
    shown: list[Example]
    """Rows whose answers before and after training are recorded."""
    packed: bool
    """Training rows are laid end to end."""
    recompute: Recompute = NOTHING
    """What the backward pass computes a second time."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parametrisation by a name that is stable between runs."""
        return {
            f"{method.kind}.{name}": parameter
            for method in attached(self.model)
            for name, parameter in method.parameters().items()
        }

    @property
    def lr_factors(self) -> dict[str, float]:
        """Name of a parameter → factor on its learning rate, where it isn't 1."""
        return {
            f"{method.kind}.{name}": factor
            for method in attached(self.model)
            for name, factor in method.lr_factors().items()
        }

    def sampler(self, *, packed: bool | None = None) -> Sampler | StreamSampler:
        """The training rows' order, from its start; `packed` None is as the run has it."""
        settings, longest = self.recipe.train, self.recipe.data.max_length
        width = longest if settings.batch_size is not None else min(longest, settings.batch_tokens)
        packed = self.packed if packed is None else packed
        batching = Batching(settings.seed, settings.batch_tokens, settings.batch_size, width if packed else None)
        if isinstance(self.train, Stream):
            return StreamSampler(self.train, batching, window=settings.grad_accum)
        return Sampler(self.train.samples, batching, window=settings.grad_accum)

    @property
    def batch_positions(self) -> int:
        """Most positions of a micro-batch, which one of an evaluation keeps to as well."""
        settings = self.recipe.train
        if settings.batch_size is None:
            return settings.batch_tokens
        return min(settings.batch_tokens, settings.batch_size * self.longest)

    @property
    def longest(self) -> int:
        """Tokens of the longest training row, or the most that a streamed one may have."""
        return self.recipe.data.max_length if isinstance(self.train, Stream) else max(self.train.lengths)

    def padding(self) -> tuple[float, float]:
        """Share of the computed positions that is padding: with packing, and without."""
        return padding_share(self.sampler(packed=True).shapes()), padding_share(self.sampler(packed=False).shapes())

    def identity(self) -> dict[str, Any]:
        """What decides the run's bits: a checkpoint is only resumed by a run of the same."""
        return {
            "recipe": self.recipe.model_dump(mode="json", exclude={"train": {"gradient_checkpointing", "shard_base"}}),
            "base": asdict(self.base.fingerprint),
            "processes": self.accelerator.num_processes,
            "train": self.train.sha256,
            "valid": self.valid.sha256 if self.valid else None,
        }

    def record(self) -> dict[str, Any]:
        """What an adapter's `peftkit.json` and the run's `run.json` say of their making."""
        template = chat_template_of(self.tokenizer)
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "seed": self.recipe.train.seed,
            "data": {"train": self.train.facts(), "valid": self.valid.facts() if self.valid else None},
            "chat_template": template._asdict() if template else None,
            "tokenizer_sha256": self.base.fingerprint.tokenizer,
            "versions": versions(),
        }


def prepare(recipe: Recipe) -> Prepared:
    """Reads the data, loads the base and attaches the recipe's adapter; what fails soonest comes first.

    Raises the errors of each: DataError, BaseModelError, RecipeError, InputError.
    """
    resident, (rows,) = load([recipe])
    return adapt(resident, recipe, rows)


def load(recipes: Sequence[Recipe]) -> tuple[Resident, list[Rows]]:
    """Reads the data of each run, then loads the base that they share; raises the errors of both."""
    check_launch()
    # told of the CPU, or it takes each of several processes there for the only one
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    return_freed_memory()
    if not accelerator.is_main_process:
        logging.getLogger("peftkit").setLevel(logging.ERROR)  # one process tells what all of them do
    for recipe in recipes:
        check_paged(recipe.optim)
    first = recipes[0]
    if any(recipe.train.shard_base != first.train.shard_base for recipe in recipes):
        raise RecipeError("train.shard_base: all runs share one base: write the same in each", field="train.shard_base")
    with accelerator.main_process_first():  # which converts a base that isn't a folder yet
        base = resolve_base(first.base)
        tokenizer = load_tokenizer(base)
    rows = _load_rows(recipes, tokenizer)
    with accelerator.main_process_first():
        model, tokenizer = load_base(
            base,
            quant=first.quant.kind,
            double_quant=first.quant.double_quant,
            compute_dtype=first.quant.compute_dtype,
            dtype=first.quant.compute_dtype,
            device=accelerator.device,
            divided=first.train.shard_base and accelerator.num_processes > 1,
        )
    if first.train.shard_base:
        _tell_shares(model, accelerator.num_processes)
    return Resident(accelerator, base, model, tokenizer), rows


def adapt(resident: Resident, recipe: Recipe, rows: Rows, *, prefix: str = "") -> Prepared:
    """Attaches a run's adapters to a bare resident base and seeds the generators. Raises RecipeError, InputError.

    `prefix` begins each line that is logged: which of several runs it is about.
    """
    model = resident.model
    attend_by_bounds(model)
    set_seed(recipe.train.seed, device_specific=True)
    for index, config in enumerate(recipe.methods):
        try:
            check_adapter_fits(model, config)
            attach(model, config, tokenizer=resident.tokenizer, seed=recipe.train.seed)
        except InputError as error:  # its message begins with the method's field
            where = f"method.{index}" if len(recipe.methods) > 1 else "method"
            raise RecipeError(f"{where}.{error}", field=f"{where}.{error.field}") from error
    assert any(parameter.requires_grad for parameter in model.parameters()), "an adapter has trainable parameters"
    _check_context(model, recipe, rows)
    packed = _packing(model, recipe, prefix)
    if resident.accelerator.device.type == "cuda":
        fuse(model)
    model.train()
    accelerator, base, tokenizer = resident.accelerator, resident.base, resident.tokenizer
    prepared = Prepared(recipe, accelerator, base, model, tokenizer, *rows, packed)
    recompute = choose_recompute(prepared)
    set_recompute(model, recompute)
    return replace(prepared, recompute=recompute)


def _tell_shares(model: PreTrainedModel, count: int) -> None:
    divided = division(model)
    if divided is None:
        logger.info("train.shard_base: there is one process, so the base stays whole")
        return
    logger.info(
        "the base's layers are divided over %d processes: each holds %.0f MB of %.0f MB, two gathered layers included",
        *(count, divided.held_bytes / 1e6, divided.whole_bytes / 1e6),
    )


def virtual_tokens(recipe: Recipe) -> int:
    """Positions that the recipe's methods put in front of each row."""
    return sum(getattr(config, "num_virtual_tokens", 0) for config in recipe.methods)


def _load_rows(recipes: Sequence[Recipe], tokenizer: PreTrainedTokenizerBase) -> list[Rows]:
    """Reads each run's rows, those of runs on the same data once, and shows what they are. Raises DataError."""
    loaded: dict[Data, tuple[Dataset | Stream, Dataset | None]] = {}
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    for recipe in recipes:
        if recipe.data in loaded:
            continue
        loaded[recipe.data] = _load_data(recipe.data, tokenizer)
        shown = audit(loaded[recipe.data][0], tokenizer, seed=recipe.train.seed).text(color=color)
        names = ", ".join(other.out for other in recipes if other.data == recipe.data)
        logger.info("%s%s", f"{names}: " if len(recipes) > 1 else "", shown)
    return [Rows(*loaded[recipe.data], *_examples(recipe, *loaded[recipe.data], tokenizer)) for recipe in recipes]


def _load_data(data: Data, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset | Stream, Dataset | None]:
    """Training and held-out rows."""
    how: dict[str, Any] = {
        "format": data.format,
        "max_length": data.max_length,
        "turns": data.turns,
        "drop_too_long": data.too_long == "drop",
    }
    load = open_stream if data.streaming else load_dataset
    train = load(data.train, tokenizer, **how)
    valid = load_dataset(data.valid, tokenizer, **how) if data.valid else None
    if valid is not None and not data.allow_overlap:
        check_overlap(train.keys, valid.keys)
        if isinstance(train, Stream):  # whose later rows aren't known yet
            train = replace(train, held_out=valid.keys)
    return train, valid


def _examples(
    recipe: Recipe, train: Dataset | Stream, valid: Dataset | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Example], list[Example]]:
    """Held-out rows to be answered for eval.metric, and rows whose answers are recorded."""
    data = recipe.data
    asked: dict[str, Any] = {
        "format": data.format,
        "max_length": data.max_length,
        "drop_too_long": data.too_long == "drop",
    }
    examples: list[Example] = []
    if valid is not None and recipe.eval.metric != "loss":
        examples = read_examples(valid.name, tokenizer, limit=recipe.eval.rows, **asked)
    rows = valid.name if valid is not None else train.source if isinstance(train, Stream) else train.name
    return examples, read_examples(rows, tokenizer, limit=recipe.log.samples, **asked)


def _packing(model: PreTrainedModel, recipe: Recipe, prefix: str) -> bool:
    """Whether rows are packed. Raises RecipeError where the recipe asks for it and the model can't keep rows apart."""
    if recipe.data.packing is False:
        return False
    reason = why_not(model, recipe.data.max_length + virtual_tokens(recipe))
    if reason and recipe.data.packing is True:
        raise RecipeError(f"data.packing: {reason}; set it to false to pad rows instead", field="data.packing")
    if reason:
        logger.info("%sdata.packing: rows are padded: %s", prefix, reason)
    return reason is None


def _check_context(model: PreTrainedModel, recipe: Recipe, rows: Rows) -> None:
    context = int(model.config.max_position_embeddings)
    lengths: list[int] = [recipe.data.max_length] if isinstance(rows.train, Stream) else rows.train.lengths
    longest = max(lengths + (rows.valid.lengths if rows.valid else [])) + virtual_tokens(recipe)
    if longest > context:
        raise InputError(
            f"data.max_length: the longest row takes {longest} positions, the base has {context}: "
            f"set data.max_length to {context - virtual_tokens(recipe)} or less",
            field="data.max_length",
        )
