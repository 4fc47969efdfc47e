"""From a recipe to all that a run works with: encoded data, the base on its device, the adapter attached."""

import logging
from dataclasses import asdict, dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.base import BaseInfo, load_base, load_tokenizer, resolve_base
from peftkit.chat import chat_template_of
from peftkit.data import Dataset, Sampler, load_dataset
from peftkit.errors import InputError, RecipeError, RunError
from peftkit.methods import attach, attached
from peftkit.recipe import Recipe
from peftkit.train.folder import versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What a run works with."""

    recipe: Recipe
    accelerator: Accelerator
    base: BaseInfo
    model: PreTrainedModel
    """In train mode, its adapter attached; only adapter parameters require grad."""
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    valid: Dataset | None

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

    def sampler(self) -> Sampler:
        """The training rows' order, from its start."""
        settings = self.recipe.train
        return Sampler(
            self.train.lengths,
            seed=settings.seed,
            batch_tokens=settings.batch_tokens,
            batch_size=settings.batch_size,
            window=settings.grad_accum,
        )

    def identity(self) -> dict[str, Any]:
        """What decides the run's bits: a checkpoint is only resumed by a run of the same."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "base": asdict(self.base.fingerprint),
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
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise RunError("training in several processes isn't supported: start peftkit train without accelerate launch")
    set_seed(recipe.train.seed)
    base = resolve_base(recipe.base)
    tokenizer = load_tokenizer(base)
    train = _load_data(recipe.data.train, recipe, tokenizer)
    valid = _load_data(recipe.data.valid, recipe, tokenizer) if recipe.data.valid else None
    model, tokenizer = load_base(
        base,
        quant=recipe.quant.kind,
        double_quant=recipe.quant.double_quant,
        compute_dtype=recipe.quant.compute_dtype,
        dtype=recipe.quant.compute_dtype,
        device=accelerator.device,
    )
    try:
        attach(model, recipe.method, tokenizer=tokenizer, seed=recipe.train.seed)
    except InputError as error:  # its message begins with the method's field
        raise RecipeError(f"method.{error}", field=f"method.{error.field}") from error
    assert any(parameter.requires_grad for parameter in model.parameters()), "an adapter has trainable parameters"
    _check_context(model, recipe, [train, *([valid] if valid else [])])
    if recipe.train.gradient_checkpointing:
        _checkpoint_activations(model)
    model.train()
    return Prepared(recipe, accelerator, base, model, tokenizer, train, valid)


def virtual_tokens(recipe: Recipe) -> int:
    """Positions that the recipe's method puts in front of each row."""
    return getattr(recipe.method, "num_virtual_tokens", 0)


def _load_data(name: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    data = load_dataset(name, tokenizer, format=recipe.data.format, max_length=recipe.data.max_length)
    if data.num_truncated:
        logger.info(
            "%s: %d of %d rows were longer than data.max_length %d: their prompts' beginnings were cut away",
            name,
            data.num_truncated,
            len(data.samples),
            recipe.data.max_length,
        )
    return data


def _check_context(model: PreTrainedModel, recipe: Recipe, datasets: list[Dataset]) -> None:
    context = int(model.config.max_position_embeddings)
    longest = max(max(data.lengths) for data in datasets) + virtual_tokens(recipe)
    if longest > context:
        raise InputError(
            f"data.max_length: the longest row takes {longest} positions, the base has {context}: "
            f"set data.max_length to {context - virtual_tokens(recipe)} or less",
            field="data.max_length",
        )


def _checkpoint_activations(model: PreTrainedModel) -> None:
    if not model.supports_gradient_checkpointing:
        raise RecipeError("train.gradient_checkpointing: this base doesn't support it: set it to false")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
