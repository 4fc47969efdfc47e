"""Files that come with peftkit, from a checkout or from an installed wheel: recipes, adapters, example data."""

import site
import sysconfig
from pathlib import Path, PurePosixPath

from peftkit.errors import DataError, InputError, did_you_mean

_PACKAGE = Path(__file__).resolve().parent
_EXAMPLES = _PACKAGE / "data" / "examples"
_PREFIX = "example:"


def shipped(relative: str) -> Path | None:
    """The file or folder `relative` ("recipes/x.yaml", "adapters/x") as shipped with peftkit, or None."""
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts:
        return None
    return next((root / parts for root in _roots() if (root / parts).exists()), None)


def find(path: str | Path) -> Path:
    """The file a user means by `path`.

    The path as typed if it exists, else a shipped file of that name, else the path as typed, so that an error names
    what the user wrote. `example:sentiment/train.jsonl` names an example data set; one that isn't there raises
    `DataError`, and what can't be a path `InputError`.
    """
    text = str(path)
    if text.startswith(_PREFIX):
        return _example(text.removeprefix(_PREFIX))
    if "\0" in text:
        raise InputError(f"{text!r} is no path: it holds a NUL character")
    try:
        typed = Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{text!r} is no path: there is no such user's home folder; write ./~… for a name") from error
    return typed if typed.exists() else shipped(text) or typed


def examples() -> list[str]:
    """The names that `find` knows after "example:", sorted."""
    return sorted(file.relative_to(_EXAMPLES).as_posix() for file in _EXAMPLES.glob("*/*.jsonl"))


def _example(name: str) -> Path:
    names = examples()
    folders = {known.partition("/")[0] for known in names}
    if name not in names and name not in folders:
        hint = did_you_mean(name, names) or f"; there are {', '.join(names)}"
        raise DataError(f"{_PREFIX}{name}: no such example data{hint}")
    return _EXAMPLES / name


def _roots() -> list[Path]:
    """Where shipped files can lie, best first: the checkout, then share/peftkit of each place pip installs to."""
    checkout = _PACKAGE.parent
    prefixes = [
        checkout,  # pip install --target puts share/ beside the package
        Path(sysconfig.get_path("data")),
        Path(site.getuserbase()),
    ]
    roots = [checkout] if (checkout / "pyproject.toml").is_file() else []
    return roots + [prefix / "share" / "peftkit" for prefix in prefixes]
