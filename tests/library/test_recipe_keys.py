"""The page of a recipe's keys is what the recipe's models say."""

import re
from pathlib import Path
from typing import Any

from peftkit.recipe import Recipe
from peftkit.recipe_keys import page

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_is_made_from_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m peftkit.recipe_keys > docs/recipe.md"


def test_every_key_has_a_row_with_its_default_and_a_meaning() -> None:
    schema = Recipe.model_json_schema()
    wanted: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        part = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2])
        if part:
            wanted |= {f"{name}.{key}": value for key, value in part["properties"].items()}
        elif name != "method":
            wanted[name] = field
    for name, part in schema["$defs"].items():
        if name.endswith("Config"):
            wanted |= {f"method.{key}": value for key, value in part["properties"].items() if key != "kind"}
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {key for key, *_ in rows} == set(wanted) | {"runs", "turn_steps"}
    assert all(type_ and meaning.endswith(".") for _, type_, _, meaning in rows)
    defaults = {key: default for key, _, default, _ in rows}
    assert (defaults["optim.lr"], defaults["data.valid"], defaults["data.train"]) == ("`0.0002`", "`null`", "needed")
