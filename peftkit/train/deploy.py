"""Putting a finished run's adapter where a server looks for it."""

from pathlib import Path

from peftkit.artifact import NAME, read_adapter, write_parts
from peftkit.errors import InputError
from peftkit.recipe import Runs
from peftkit.train.folder import check_writable, without_own


def check_deployment(runs: Runs, folder: Path) -> None:
    """Raises InputError where the runs' adapters can't be put into `folder`, each under its out folder's name, and
    RunError where nothing can be written there."""
    names = [Path(recipe.out).expanduser().resolve().name for recipe in runs.recipes]
    for name in names:
        if not NAME.fullmatch(name):
            raise InputError(
                f"--deploy: out ends in '{name}', which can't be an adapter's name: use letters, digits, '.', '_', '-'",
                field="deploy",
            )
        if names.count(name) > 1:
            raise InputError(f"--deploy: two runs' out folders are called '{name}'", field="deploy")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--deploy: {folder} is a file, not a folder", field="deploy")
    check_writable(folder, field="--deploy")


def deploy(out: Path, folder: Path) -> Path:
    """Writes the adapter of the run in `out` to `folder`/NAME, in the place of an older one, and nothing of the run
    beside it. A reader finds the old adapter or the new one. Raises RunError where there is no room."""
    adapter = read_adapter(out)
    target = folder / out.resolve().name
    write_parts(target, [(part.config, part.tensors) for part in adapter.parts], without_own(adapter.record))
    return target
