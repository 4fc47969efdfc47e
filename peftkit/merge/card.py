"""README.md of what is exported: where it comes from, what it was trained on, how good it is, under which licence."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peftkit.artifact import Artifact
from peftkit.base import BaseInfo

CARD_FILE = "README.md"


def model_card(report: Mapping[str, Any], artifact: Artifact, info: BaseInfo) -> str:
    """The card of a merged model; `report` is what peftkit_merge.json holds."""
    lines = [
        f"A {artifact.kind} adapter merged into {_called(info.name)}, as {report['dtype']} weights"
        f" in the {report['format']} format.",
        "",
        *_provenance(artifact, _called(info.name)),
        f"- merged into the {report['mode']} weights: {report['num_merged']} changed, which keep "
        f"{report['kept']:.4%} of the change",
    ]
    if found := report["equivalence"]:
        lines.append(
            f"- logits against base and adapter over {found['num_prompts']} prompts: relative difference "
            f"{found['relative']:.2g}, KL {found['kl']:.2g} nats, the same most likely token at "
            f"{found['greedy_agreement']:.1%} of {found['num_tokens']} positions"
        )
    lines += _training(artifact)
    return _page(_called(info.name), licence_of(info.path), lines, library="transformers", peft=False)


def adapter_card(artifact: Artifact, base_name: str | None, base_folder: Path | None) -> str:
    """The card of an adapter for HF PEFT."""
    base = _called(base_name) if base_name else "a base that its maker doesn't name"
    lines = [f"A {artifact.kind} adapter for {base}.", "", *_provenance(artifact, base), *_training(artifact)]
    licence = None if base_folder is None else licence_of(base_folder)
    return _page(base, licence, lines, library="peft", peft=True)


def licence_of(folder: Path) -> str | None:
    """The licence that a base's folder names: in its provenance, or at the head of its card."""
    try:
        provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        if isinstance(found := provenance["source"]["licence"], str):
            return found.lower()
    except (OSError, ValueError, KeyError, TypeError):
        pass  # the card may say it
    card = folder / CARD_FILE
    if card.is_file():
        for line in card.read_text(encoding="utf-8", errors="replace").splitlines()[:60]:
            key, _, value = line.partition(":")
            if key.strip() == "license" and value.strip():
                return value.strip().lower()
    return None


def _called(name: str) -> str:
    """A base by its name; a path of this machine by its last part."""
    return Path(name).name if Path(name).is_absolute() else name


def _page(base: str, licence: str | None, lines: list[str], *, library: str, peft: bool) -> str:
    head = ["---", f"base_model: {json.dumps(base)}", f"library_name: {library}", "pipeline_tag: text-generation"]
    if licence:
        head.append(f"license: {licence}")
    head += ["tags:", "- peftkit", *(["- peft"] if peft else []), "---", ""]
    said = f"The base's licence is {licence}; it holds for what is made from it." if licence else None
    unsaid = "The base's folder names no licence: ask its maker before passing this on."
    return "\n".join([*head, f"# {base} with an adapter", "", *lines, "", "## Licence", "", said or unsaid, ""])


def _provenance(artifact: Artifact, base: str) -> list[str]:
    record = artifact.record
    lines = ["## Provenance", "", f"- adapter: {artifact.kind}, uid {artifact.uid}", f"- base: {base}"]
    if quant := record.get("quant"):
        lines.append(f"- trained on the base's {'NF4' if quant == 'nf4' else 'own'} weights")
    for name in ("seed", "step"):
        if name in record:
            lines.append(f"- {name}: {record[name]}")
    if composed := record.get("composed"):
        lines.append(f"- composed of {len(composed['adapters'])} adapters by {composed['method']}")
        lines += [f"  - {one['uid']}, weight {one['weight']}" for one in composed["adapters"]]
    return lines


def _training(artifact: Artifact) -> list[str]:
    lines = ["", "## Data", ""]
    sets: Mapping[str, Any] = artifact.record.get("data") or {}
    for name, facts in sets.items():
        if isinstance(facts, Mapping):
            said = [_called(str(facts["path"]))] if "path" in facts else []
            said += [f"{facts[key]} {key}" for key in ("rows", "tokens") if key in facts]
            said += [f"SHA-256 {facts['sha256']}"] if "sha256" in facts else []
            lines.append(f"- {name}: {', '.join(said)}")
    if not sets:
        lines.append("Its maker's record names none.")
    lines += ["", "## Metrics", ""]
    metrics: Mapping[str, Any] = artifact.record.get("metrics") or {}
    for name, value in metrics.items():
        lines.append(f"- {name}: {value:.4g}" if isinstance(value, float) else f"- {name}: {value}")
    if not metrics:
        lines.append("Its maker's record names none.")
    return lines
