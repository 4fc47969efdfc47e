"""A folder whose sub-folders are adapters: `DIR/NAME/adapter_config.json` is served as NAME, as it comes and changes.

A writer puts the files into a folder whose name begins with a dot and renames it, so that no half of an adapter is
seen; one that writes in place is waited for until nothing has changed for a moment. What can't be served is refused in
the log, by name, and looked at again when it has changed. A folder that is removed leaves its adapter as it is.
"""

import asyncio
import logging
import time
from pathlib import Path

from peftkit.errors import InputError, RunError
from peftkit_serve.tenants.catalog import Catalog
from peftkit_serve.tenants.records import SHARED

logger = logging.getLogger(__name__)

_QUIET_S = 1.0


class Watcher:
    """Looks at the folder when it is told to."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self._folder, self._catalog = folder, catalog
        self._seen: dict[str, tuple[float, ...]] = {}
        self._first = True

    async def look(self) -> None:
        """Publishes what is new: the first time everything, later what has changed and is quiet."""
        for name, stamp in (await asyncio.to_thread(self._stamps)).items():
            if self._seen.get(name) == stamp or (not self._first and time.time() - max(stamp) < _QUIET_S):
                continue
            self._seen[name] = stamp
            folder = self._folder / name
            try:
                version = await self._catalog.publish(SHARED, name, lambda to, of=folder: to.copy(of), known=False)
                logger.info({"adapter": name, "version": version.number, "from": "watched folder"})
            except (InputError, RunError) as error:
                logger.warning("adapter '%s' is refused: %s", name, error)
        self._first = False

    def _stamps(self) -> dict[str, tuple[float, ...]]:
        """Each adapter's folder with the times of change of its files."""
        found: dict[str, tuple[float, ...]] = {}
        try:
            for folder in sorted(self._folder.iterdir()):
                if not folder.name.startswith(".") and (folder / "adapter_config.json").is_file():
                    files = sorted(folder.rglob("*"))
                    found[folder.name] = (folder.stat().st_mtime, *(file.stat().st_mtime for file in files))
        except OSError as error:  # it changes while it is looked at
            logger.debug("the watched folder can't be read: %s", error)
        return found
