"""Every key of a recipe as Markdown, from the models themselves: `python -m peftkit.recipe_keys > docs/recipe.md`."""

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from peftkit.recipe import Recipe
from peftkit.recipe_errors import method_configs, sections

_BEGINNING = """# Every key of a recipe

A recipe is a YAML file of these keys, all with a default but `data.train`. On the command line a key is written
`key.path=value`, as in `optim.lr=1e-3`; the value is YAML. A key that isn't here is refused, with the nearest that is.
What the keys do together is in [training](training.md) and [data](data.md). This page is made from the recipe's own
models: `python -m peftkit.recipe_keys > docs/recipe.md`.
"""
_METHOD = """## `method`

One of the following by its `kind`, or a list of two that are trained together; by default `{kind: lora}`.
"""
_RUNS = """## Several runs on one base

| key | type | default | meaning |
| --- | --- | --- | --- |
| `runs` | list of mappings | none | Each run is the recipe's other keys with its own in their place. |
| `turn_steps` | whole number ≥ 1 or `null` | `null` | Steps of a turn; null trains one run after another. |
"""
_NAMES: dict[Any, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    NoneType: "`null`",
}


def page() -> str:
    """The whole page."""
    parts = [_BEGINNING, "## The recipe\n", _table(_top())]
    parts += [
        f"## `{name}`\n\n{Recipe.model_fields[name].description}\n\n{_table(_keys(name, part))}"
        for name, part in sections(Recipe)
    ]
    parts.append(_METHOD)
    for config in method_configs():
        kind = config.model_fields["kind"].default
        parts.append(f"### `method: {{kind: {kind}}}`\n\n{_table(_keys('method', config))}")
    return "\n".join([*parts, _RUNS])


def _top() -> Iterator[tuple[str, FieldInfo]]:
    within = dict(sections(Recipe))
    return ((name, field) for name, field in Recipe.model_fields.items() if name not in within and name != "method")


def _keys(section: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    return (
        (f"{section}.{name}", field)
        for name, field in model.model_fields.items()
        if name != "kind" or section != "method"
    )


def _table(keys: Iterator[tuple[str, FieldInfo]]) -> str:
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in keys:
        default = json.dumps(field.get_default(call_default_factory=True), ensure_ascii=False)
        shown = "needed" if key == "data.train" else f"`{default.strip(chr(34)) or default}`"
        cells = (f"`{key}`", _type(field.annotation, field.metadata), shown, field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type in words, its bounds in it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0], [bound for each in inner[1:] for bound in getattr(each, "metadata", [each])])
    if origin in (Union, UnionType):
        return " or ".join(_type(each, metadata) for each in inner)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in inner)
    if origin is list:
        return f"list of {_type(inner[0], [])}s"
    if origin is tuple:
        return f"list of {len(inner)} {_type(inner[0], [])}s"
    if origin is dict:
        return f"mapping of {_type(inner[0], [])} to {_type(inner[1], [])}"
    bounds = _bounds(metadata) if annotation in (int, float) else ""
    return _NAMES[annotation] + bounds


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {bound:,}".removesuffix(".0")
        for name, sign in signs.items()
        for each in metadata
        if (bound := getattr(each, name, None)) is not None
    ]
    return " " + ", ".join(found) if found else ""


if __name__ == "__main__":
    print(page(), end="")
