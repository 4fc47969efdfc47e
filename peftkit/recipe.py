"""The recipe of a run: YAML in, checked settings out.

A key that isn't known, a value of the wrong type or out of range raises RecipeError, one line for each: the file, the
dotted key, what is wrong and the nearest right key. `key.path=value` overrides are read as YAML and are checked alike:
in their lines the override stands in the file's place.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from peftkit import resources
from peftkit.errors import InputError, RecipeError, did_you_mean
from peftkit.methods import AnyConfig, LoraConfig, MethodConfig, check_together
from peftkit.recipe_errors import ONE, SEVERAL, Override, lines, shown_override, shown_value
from peftkit.recipe_yaml import read_yaml

EXAMPLE = "example:"
"""Prefix of a data path that names a file of the example sets."""
_DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Quant(_Section):
    """How the frozen base is held in memory."""

    kind: Literal["none", "nf4"] = "nf4"
    """nf4: 4-bit NormalFloat through bitsandbytes; none: the base's own precision."""
    double_quant: bool = True
    """Quantise NF4's scales too, which saves 0.37 bits a weight."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the arithmetic; auto: bfloat16 on a GPU that has it, float32 on a CPU."""


class Data(_Section):
    """What is trained on."""

    train: str = ""
    """Training rows: a JSONL, JSON, CSV, Parquet or text file, a folder of `datasets`, a hub id; needed."""
    valid: str | None = None
    """Held-out rows; null trains without evaluation."""
    format: Literal["auto", "completion", "chat", "instruction", "text"] = "auto"
    """What rows hold: prompt and completion, messages, instruction and output, or text; auto: by the first row."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns of a chat are trained; a message with `train: false` never is."""
    max_length: int = Field(default=512, ge=2)
    """Most tokens of a row; longer prompts are cut from the left and longer chats lose their oldest turns."""
    too_long: Literal["error", "drop"] = "error"
    """What becomes of a row whose answer alone doesn't fit max_length."""
    packing: Literal["auto"] | bool = "auto"
    """Several rows end to end in one of max_length tokens; auto: where the attention can keep them apart."""
    streaming: bool = False
    """Read and encode training rows while training, shuffled within 1024 of them; needs train.max_steps."""
    allow_overlap: bool = False
    """Train although rows of valid are among those of train; false makes that an error."""


class Optim(_Section):
    """The optimiser and its learning rate."""

    name: Literal["auto", "adamw", "adamw_8bit", "paged_adamw_8bit"] = "auto"
    """auto is adamw: AdamW with float32 moments; 8-bit moments take a quarter, paged ones leave a full GPU."""
    lr: float = Field(default=2.0e-4, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up; linear and cosine end at 0."""
    warmup: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises to its peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the adapter's weights."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it; null never clips."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""

    @model_validator(mode="after")
    def _betas_are_shares(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie between 0 and 1, not {list(self.betas)}")
        return self


class Train(_Section):
    """How long and in what portions."""

    epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over the training rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, however many epochs that takes; null goes by epochs."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens of a micro-batch, padding included; used when batch_size is null."""
    batch_size: int | None = Field(default=None, ge=1)
    """Rows of a micro-batch, drawn at random; null fills batch_tokens with rows of like length."""
    grad_accum: int = Field(default=1, ge=1)
    """Micro-batches of an optimiser step."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Fixes the adapter's start, the order of rows and dropout."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full", "offload"] | bool = "auto"
    """What the backward pass computes again to save memory; auto: as little as fits, true is full, false none."""
    shard_base: bool = False
    """Divide the layers of the frozen base over the processes of a run, which gather each when it is computed."""
    save_every: int = Field(default=100, ge=0)
    """Steps between checkpoints; 0 saves only at the end and when interrupted."""


class Eval(_Section):
    """Evaluation on data.valid during training; there is always one at the end."""

    every: int = Field(default=100, ge=0)
    """Steps between evaluations; 0 evaluates only at the end."""
    metric: Literal["loss", "exact_match", "accuracy", "rouge_l"] = "loss"
    """What the best adapter is chosen by: the mean loss per target token, or a score of generated answers."""
    rows: int | None = Field(default=None, ge=1)
    """Rows of data.valid that are answered for a metric other than loss; null: all."""
    early_stop: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without a new best; needs data.valid; null never stops early."""


class Log(_Section):
    """What is recorded while training."""

    every: int = Field(default=10, ge=1)
    """Steps between lines of metrics.jsonl."""
    samples: int = Field(default=3, ge=0)
    """Rows whose answers before and after training are recorded for the report."""
    tensorboard: bool = True
    """Write TensorBoard curves too, where the tensorboard package is installed."""
    wandb: bool = False
    """Send the curves to Weights & Biases too; needs the wandb package."""


Methods = Annotated[
    Annotated[MethodConfig, Tag(ONE)] | Annotated[tuple[MethodConfig, ...], Tag(SEVERAL)],
    Discriminator(lambda value: SEVERAL if isinstance(value, (list, tuple)) else ONE),
]


class Recipe(_Section):
    """All settings of one training run."""

    base: str = "smollm2-135m"
    """Base model: the embedded default, an HF folder, a .gguf file or a hub id."""
    quant: Quant = Quant()
    """How the base is held in memory."""
    method: Methods = Field(default_factory=LoraConfig)
    """The adapter, or a list of two that are trained together, one of them with virtual tokens."""
    data: Data = Data()
    """What is trained on."""
    optim: Optim = Optim()
    """The optimiser and its learning rate."""
    train: Train = Train()
    """How long and in what portions."""
    eval: Eval = Eval()
    """Evaluation during training."""
    log: Log = Log()
    """What is recorded."""
    out: str = "runs/adapter"
    """Folder of the run; when it is done it is the adapter's folder."""

    @property
    def methods(self) -> tuple[AnyConfig, ...]:
        """The methods that are trained together, in the order in which they are attached."""
        return self.method if isinstance(self.method, tuple) else (self.method,)

    @field_validator("method")
    @classmethod
    def _methods_go_together(cls, method: AnyConfig | tuple[AnyConfig, ...]) -> AnyConfig | tuple[AnyConfig, ...]:
        if isinstance(method, tuple):
            if not method:
                raise ValueError("an empty list: name a method, as in method: {kind: lora}")
            try:
                check_together([config.kind for config in method])
            except InputError as error:
                raise ValueError(str(error)) from error
        return method

    @field_validator("out")
    @classmethod
    def _out_is_a_path(cls, out: str) -> str:
        if not out.strip():
            raise ValueError("is empty: name the folder of the run")
        if "\0" in out:
            raise ValueError(f"{out!r} is no path: it holds a NUL character")
        try:
            Path(out).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{out!r} is no path: there is no such user; write ./~… for a name") from error
        return out

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if not self.data.train:
            raise ValueError("data.train is missing: name a file of training rows")
        if self.eval.metric != "loss" and self.data.valid is None:
            raise ValueError(f"eval.metric {self.eval.metric} needs data.valid: held-out rows to answer")
        if self.eval.early_stop is not None and self.data.valid is None:
            raise ValueError("eval.early_stop needs data.valid: held-out rows to evaluate on")
        if self.data.streaming and self.train.max_steps is None:
            raise ValueError("data.streaming needs train.max_steps: how many rows a stream has isn't known")
        return self


@dataclass(frozen=True)
class Runs:
    """Runs on one base, which is loaded once."""

    recipes: tuple[Recipe, ...]
    turn_steps: int | None = None
    """Train them in turns of so many steps; None: one after another."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads the recipe of one run and applies `key.path=value` overrides.

    Data files are looked for in the current folder, then beside the recipe. Raises RecipeError, also for a recipe with
    `runs`, which `load_runs` reads.
    """
    runs = load_runs(path, overrides).recipes
    if len(runs) > 1:
        raise RecipeError(f"{path}: runs: this recipe holds {len(runs)} runs where one is wanted", field="runs")
    return next(iter(runs))


def load_runs(path: str | Path, overrides: Sequence[str] = ()) -> Runs:
    """Reads a recipe of one run, or of several on one base.

    A recipe may have `runs`, a list of mappings: each is a run by the recipe's other keys with its own in their place
    (`method` whole, other sections key by key), and `turn_steps`. Overrides are set in every run. Raises RecipeError.
    """
    file = resources.find(str(path))
    content = _read_mapping(file, str(path))
    if "runs" not in content and "turn_steps" not in content:
        return Runs((_one(content, file, str(path), overrides),))
    runs, turn_steps = content.pop("runs", None), content.pop("turn_steps", None)
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise RecipeError(f"{path}: runs: must be a list of mappings, not {shown_value(runs)}", field="runs")
    if turn_steps is not None and (type(turn_steps) is not int or turn_steps < 1):
        raise RecipeError(f"{path}: turn_steps: must be a whole number above 0, not {shown_value(turn_steps)}")
    recipes: list[Recipe] = []
    for index, run in enumerate(runs):
        where = f"{path}: runs.{index}"
        for key in ("base", "quant"):
            if key in run:
                raise RecipeError(f"{where}.{key}: all runs share one base: write {key} beside runs", field=key)
        recipe = _one(_merged(content, run), file, where, overrides)
        if other := next((other for other in recipes if _overlap(recipe.out, other.out)), None):
            raise RecipeError(
                f"{where}.out: '{recipe.out}' is, lies in or holds another run's '{other.out}': give each its own",
                field="out",
            )
        recipes.append(recipe)
    return Runs(tuple(recipes), turn_steps)


def _overlap(one: str, other: str) -> bool:
    """Whether two folders are the same, or one lies in the other."""
    first, second = (Path(out).expanduser().resolve() for out in (one, other))
    return first.is_relative_to(second) or second.is_relative_to(first)


def _merged(shared: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The keys that runs share, with a run's own in their place."""
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in shared.items()}
    for key, value in run.items():
        below = content.get(key)
        together = key != "method" and isinstance(below, dict) and isinstance(value, dict)
        content[key] = {**below, **value} if together else value  # type: ignore[dict-item]
    return content


def _one(content: dict[str, Any], file: Path, source: str, overrides: Sequence[str]) -> Recipe:
    applied = [_apply(content, override) for override in overrides]
    recipe = _validate(content, source, applied)
    return recipe.model_copy(update={"data": _beside(recipe.data, file.parent)})


def _read_mapping(file: Path, source: str) -> dict[str, Any]:
    if file.suffix.lower() in _DATA:
        raise RecipeError(
            f"{source}: a recipe is a YAML file: name rows in its data.train (peftkit data check shows them)"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(f"{source}: there is no such recipe{_nearest_recipe(file, source)}") from error
    except IsADirectoryError as error:
        raise RecipeError(f"{source}: is a folder: name a recipe in it, as {source.rstrip('/')}/NAME.yaml") from error
    except OSError as error:
        raise RecipeError(f"{source}: can't read the recipe: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{source}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    content = read_yaml(text, source)
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise RecipeError(f"{source}: a recipe is a mapping of keys to values, not a {type(content).__name__}")
    return content


def _nearest_recipe(file: Path, source: str) -> str:
    """The file beside it or the shipped recipe that was meant."""
    beside = {str(Path(source).with_name(path.name)) for path in file.parent.glob("*.y*ml")}
    folder = resources.shipped("recipes")
    shipped = {f"recipes/{path.name}" for path in folder.glob("*.yaml")} if folder else set()
    if near := did_you_mean(source, sorted(beside | shipped), likeness=0.75):
        return near
    return f": name a YAML file, or one that comes with peftkit: {', '.join(sorted(shipped))}"


def _validate(content: dict[str, Any], source: str, overrides: Sequence[Override]) -> Recipe:
    try:
        # through JSON, where strictness still lets a list be a tuple and an integer a float
        text = json.dumps(content, default=str)
    except ValueError as error:  # a hexadecimal integer may have more digits than Python writes out
        raise RecipeError(f"{source}: a value can't be read: {error}") from error
    try:
        return Recipe.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise RecipeError("\n".join(lines(error, Recipe, source, overrides))) from error


def _apply(content: dict[str, Any], typed: str) -> Override:
    """Sets one `key.path=value` in `content`."""
    shown = shown_override(typed)
    key, equals, text = typed.partition("=")
    keys = key.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"{shown}: write it as key.path=value, as in optim.lr=1e-3")
    try:
        value = read_yaml(text, shown)
    except RecipeError as error:
        raise RecipeError(f"{error}; a value with spaces needs quotes, as in 'method={{kind: lora}}'") from error
    section, made = content, key
    for depth, name in enumerate(keys[:-1], start=1):
        above = ".".join(keys[:depth])
        if section.get(name) is None:
            section[name] = {}
            made = min(made, above, key=len)
        if not isinstance(section[name], dict):
            raise RecipeError(f"{shown}: {above} is {shown_value(section[name])}, not a section")
        section = section[name]
    section[keys[-1]] = value
    return Override(typed, key, made)


def _beside(data: Data, folder: Path) -> Data:
    """`data` with relative paths that exist beside the recipe, and not in the current folder, made to point there."""

    def place(path: str | None) -> str | None:
        if path is None or path.startswith(EXAMPLE):
            return path
        try:
            return path if Path(path).exists() or not (folder / path).exists() else str(folder / path)
        except OSError as error:
            raise RecipeError(f"data: '{path[:80]}' is no path: {error.strerror}") from error

    return data.model_copy(update={"train": place(data.train), "valid": place(data.valid)})
