"""YAML as recipes have it: 1.1 without its surprises."""

import re
from typing import Any

import yaml

from peftkit.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without its surprises: a key given twice or an alias is an error, and 2e-4 is a number."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # aliases nest to any size, or into themselves, and a recipe has no use for them
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[union-attr]
            raise yaml.constructor.ConstructorError(None, None, "an alias (*name) isn't allowed: write it out", mark)
        return super().compose_node(parent, index)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a name", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


def _no_value(loader: _Loader, node: yaml.Node) -> Any:
    kind = node.tag.rpartition(":")[2]
    raise yaml.constructor.ConstructorError(None, None, f"!!{kind} is no value of a recipe", node.start_mark)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
for _kind in ("binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _no_value)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def read_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; `source` names it in messages. Raises RecipeError with the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and not source.startswith("override ") else ""
        problem = str(error.problem or error.context)
        remedy = ": indent with spaces" if "'\\t'" in problem else ""
        raise RecipeError(f"{source}{line}: not valid YAML: {problem}{remedy}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # what yaml's own constructors let through: !!float abc, a date that isn't one, brackets a thousand deep
        problem = " ".join(str(error).split())
        raise RecipeError(f"{source}: not valid YAML: a value can't be read: {problem}") from error
