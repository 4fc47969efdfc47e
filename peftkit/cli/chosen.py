"""What a command works on: an adapter or the bare base, and how the base's weights are held."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peftkit import resources
from peftkit.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peftkit.artifact import Artifact
    from peftkit.base import BaseInfo, Quant

ENGINE_NAME = "adapter"
"""What the adapter is called in a command's own engine."""


@dataclass(frozen=True)
class Chosen:
    """A base, and an adapter on it or None."""

    base: "BaseInfo"
    quant: "Quant"
    artifact: "Artifact | None"

    @property
    def double_quant(self) -> bool:
        """Whether NF4's scales are quantised too: as the adapter was trained, by default they are."""
        recipe = (self.artifact.record.get("recipe") if self.artifact else None) or {}
        return (recipe.get("quant") or {}).get("double_quant") is not False

    @property
    def adapter(self) -> Path | None:
        """The adapter's folder."""
        return self.artifact.path if self.artifact else None

    @property
    def engine_name(self) -> str | None:
        """What requests call the adapter; None for the bare base."""
        return ENGINE_NAME if self.artifact else None

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The base's tokenizer, with the adapter's chat template if it has one."""
        from peftkit.base import load_tokenizer

        tokenizer = load_tokenizer(self.base)
        if self.artifact and (template := self.artifact.record.get("chat_template")):
            tokenizer.chat_template = template["text"]
        return tokenizer

    def facts(self) -> dict[str, object]:
        """How a command's result names what it worked on."""
        return {
            "base": self.base.name,
            "adapter": self.adapter,
            "adapter_uid": self.artifact.uid if self.artifact else None,
            "quant": self.quant,
        }


def choose(adapter: str | None, base: str | None, quant: "Quant | None") -> Chosen:
    """The adapter and base that a user names; what isn't named is what the adapter was trained on.

    Raises InputError when no base is known, AdapterError or BaseModelError for one that can't be read.
    """
    from peftkit.artifact import read_adapter
    from peftkit.base import resolve_base

    folder = None if adapter is None else resources.find(adapter)
    if folder is not None and (folder / "run.json").exists() and not (folder / "peftkit.json").exists():
        raise InputError(
            f"{adapter}: the run in it hasn't exported its adapter yet: go on with peftkit train … --resume",
            field="adapter",
        )
    artifact = None if folder is None else read_adapter(folder)
    trained_on: Quant = artifact.record.get("quant", "none") if artifact else "none"
    return Chosen(resolve_base(base or base_named_by(artifact)), quant or trained_on, artifact)


def base_named_by(artifact: "Artifact | None") -> str:
    """The base that an adapter names. Raises InputError when there is none."""
    from peftkit.merge import named_base

    if artifact is None:
        raise InputError("name an adapter with --adapter, or a base with --base", field="base")
    # two methods together have a folder each, and only the record lies beside both
    name = named_base(artifact) if len(artifact.parts) == 1 else (artifact.record.get("base") or {}).get("id")
    if not name:
        raise InputError(f"{artifact.path} doesn't say which base it was made for: name it with --base", field="base")
    return name
