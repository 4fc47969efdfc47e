"""What is wrong with a recipe, in lines that name the file or the override, the key, and the nearest right key."""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from peftkit.errors import did_you_mean
from peftkit.methods import MethodConfig

ONE, SEVERAL = "one", "several"
"""Tags of a recipe's method by itself, and of a list."""

ELSEWHERE = {
    "learning_rate": "optim.lr",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "optimizer": "optim.name",
    "warmup_ratio": "optim.warmup",
    "rank": "method.r",
    "lora_r": "method.r",
    "lora_rank": "method.r",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "target_modules": "method.targets",
    "lora_target_modules": "method.targets",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "steps": "train.max_steps",
    "micro_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "save_steps": "train.save_every",
    "eval_steps": "eval.every",
    "early_stopping_patience": "eval.early_stop",
    "logging_steps": "log.every",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length",
    "sample_packing": "data.packing",
    "dataset": "data.train",
    "datasets": "data.train",
    "train_file": "data.train",
    "validation_file": "data.valid",
    "base_model": "base",
    "model": "base",
    "model_name_or_path": "base",
    "load_in_4bit": "quant.kind",
    "output_dir": "out",
}
"""What other trainers call a setting → our key."""


@dataclass(frozen=True)
class Override:
    """A `key.path=value` of the command line that was put into a recipe."""

    typed: str
    key: str
    made: str
    """The beginning of the key that the recipe itself doesn't have, or the whole key."""

    @property
    def shown(self) -> str:
        """How messages name it."""
        return shown_override(self.typed)

    def holds(self, dotted: str) -> bool:
        """Whether a key was put there by this override."""
        return dotted in (self.key, self.made) or dotted.startswith(f"{self.key}.")


def shown_override(typed: str) -> str:
    """How messages name an override."""
    return f"override '{typed if len(typed) <= 80 else typed[:79] + '…'}'"


def shown_value(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def lines(error: ValidationError, recipe: type[BaseModel], source: str, overrides: Sequence[Override]) -> list[str]:
    """A line for each key that is wrong; `source` names the file."""
    found: dict[tuple[str, ...], list[_Fault]] = {}
    for detail in error.errors(include_url=False):
        fault = _locate(dict(detail), recipe)
        found.setdefault(fault.path, []).append(fault)
    return [_line(faults, recipe, source, overrides) for faults in found.values()]


@dataclass(frozen=True)
class _Fault:
    """One pydantic error."""

    detail: dict[str, Any]
    path: tuple[str, ...]
    """The keys as a user typed them."""
    section: type[BaseModel] | None
    """The model that the last of them belongs to."""


def _locate(detail: dict[str, Any], recipe: type[BaseModel]) -> _Fault:
    path: list[str] = []
    owner: type[BaseModel] | None = recipe
    section: type[BaseModel] | None = None
    rest: list[int | str] = list(detail["loc"])
    while rest:
        key = rest.pop(0)
        if owner is None and not isinstance(key, int):
            continue  # pydantic puts the tags of unions into the location
        path.append(str(key))
        section = owner
        if key == "method" and len(path) == 1 and rest:
            if rest.pop(0) == SEVERAL and rest:
                path.append(str(rest.pop(0)))
            kind = rest.pop(0) if rest else None
            owner = next((method for method in method_configs() if _kind(method) == kind), None)
            continue
        field = owner.model_fields.get(str(key)) if owner else None
        annotation = field.annotation if field else None
        owner = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    if detail["type"] == "union_tag_invalid":
        path.append("kind")
    return _Fault(detail, tuple(path), section)


def _line(faults: Sequence[_Fault], recipe: type[BaseModel], source: str, overrides: Sequence[Override]) -> str:
    fault = faults[0]
    dotted = ".".join(fault.path)
    message = _message(faults, recipe, overrides)
    override = next((override for override in overrides if override.holds(dotted)), None)
    if override is None and fault.detail["type"] == "value_error":  # of a whole section: of which key its text tells
        within = f"{dotted}." if dotted else ""
        below = [each for each in overrides if each.key.startswith(within)]
        override = next((each for each in below if each.key.removeprefix(within) in message.split()), None)
    where = source if override is None else override.shown
    if dotted and (override is None or dotted not in (override.key, override.made)):
        where += f": {dotted}"
    return f"{where}: {message}"


def _message(faults: Sequence[_Fault], recipe: type[BaseModel], overrides: Sequence[Override]) -> str:
    fault = faults[0]
    detail = fault.detail
    match detail["type"]:
        case "extra_forbidden":
            return "unknown key" + _nearest(fault, recipe, overrides)
        case "union_tag_invalid":
            kind, kinds = detail["ctx"]["tag"], detail["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"no method '{kind}'{did_you_mean(kind, kinds)} (there are: {', '.join(kinds)})"
        case "union_tag_not_found":
            return f"kind is missing: name one of {', '.join(map(_kind, method_configs()))}"
        case "value_error":
            return str(detail["ctx"]["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            example = ", as in {kind: lora}" if fault.path[:1] == ("method",) else ""
            return f"must be a mapping of keys to values{example}, not {shown_value(detail['input'])}"
        case "missing":
            return f"is missing: the value is {shown_value(detail['input'])}"
        case _:  # several of one key are those of a union's members
            wanted = dict.fromkeys(each.detail["msg"].removeprefix("Input should be ") for each in faults)
            return f"should be {' or '.join(wanted)}, not {shown_value(detail['input'])}"


def _nearest(fault: _Fault, recipe: type[BaseModel], overrides: Sequence[Override]) -> str:
    """The key that was meant: another trainer's name for it, that of another section, the nearest of its own; else all
    there are."""
    *above, key = fault.path
    section = fault.section
    own = list(section.model_fields) if section else []
    if section in method_configs():
        if kinds := [_kind(method) for method in method_configs() if key in method.model_fields]:
            whole = f"; method={{kind: {_kind(section)}}} sets the method as a whole"
            replaced = any(override.key == "method.kind" for override in overrides)
            return f" of {_kind(section)}, it is one of {', '.join(kinds)}" + (whole if replaced else "")
    meant = ELSEWHERE.get(key.lower(), "")
    parent, _, name = meant.rpartition(".")
    if meant and (parent != "method" or not above or name in own):
        return f"; did you mean '{meant}'?"
    for name, part in sections(recipe):
        if key in part.model_fields and name not in above:
            return f"; did you mean '{name}.{key}'?"
    if near := difflib.get_close_matches(key, own, n=1, cutoff=0.6):
        return f"; did you mean '{_completed('.'.join([*above, near[0]]), fault, overrides)}'?"
    return f" (there are: {', '.join(own)})" if own else ""


def _completed(dotted: str, fault: _Fault, overrides: Sequence[Override]) -> str:
    """A key with what an override has after the key that it stands for."""
    wrong = ".".join(fault.path)
    return next((dotted + each.key.removeprefix(wrong) for each in overrides if each.made == wrong), dotted)


def sections(recipe: type[BaseModel]) -> Iterable[tuple[str, type[BaseModel]]]:
    """The keys that hold further keys, and the model of each."""
    for name, field in recipe.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield name, part


def method_configs() -> tuple[type[BaseModel], ...]:
    """The model of each kind of method."""
    union, *_ = get_args(MethodConfig)
    return get_args(union)


def _kind(method: type[BaseModel] | None) -> str:
    assert method is not None
    return str(method.model_fields["kind"].default)
