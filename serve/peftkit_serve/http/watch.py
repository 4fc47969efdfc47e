"""A folder whose sub-folders are adapters: `DIR/NAME/adapter_config.json` is served as NAME, as it comes, changes and
goes.

A writer puts the files into a folder whose name begins with a dot and renames it, so that no half of an adapter is
seen; one that writes in place is waited for until nothing has changed for a moment. What can't be served is refused in
the log, by name, and looked at again when it has changed. A folder that is gone for as long, or when the server begins,
takes its adapter along; nothing else of the database is touched.
"""

import asyncio
import logging
import time
from pathlib import Path

from peftkit.errors import InputError, RunError
from peftkit_serve.tenants.catalog import Catalog

logger = logging.getLogger(__name__)

_QUIET_S = 1.0

Stamp = tuple[float, ...]
"""Times of change; empty where there are none to tell: no adapter yet, or it changes while it is looked at."""


class Watcher:
    """Looks at the folder when it is told to."""

    def __init__(self, folder: Path, catalog: Catalog, owner: str) -> None:
        """owner: whose the folder's adapters are."""
        self._folder, self._catalog, self._owner = folder, catalog, owner
        self._seen: dict[str, Stamp] = {}
        self._missing: dict[str, float] = {}
        self._first = True

    async def look(self) -> None:
        """Publishes what is new and removes what is gone: the first time all, later what has been quiet."""
        stamps = await asyncio.to_thread(self._stamps)
        if stamps is None:
            return
        for name, stamp in stamps.items():
            if not stamp or self._seen.get(name) == stamp or (not self._first and time.time() - max(stamp) < _QUIET_S):
                continue
            self._seen[name] = stamp
            folder = self._folder / name
            try:
                version = await self._catalog.publish(self._owner, name, lambda to, of=folder: to.copy(of), known=False)
                logger.info({"adapter": name, "version": version.number, "from": "watched folder"})
            except (InputError, RunError, OSError) as error:  # of the disk's too: the others are still to be looked at
                logger.warning("adapter '%s' is refused: %s", name, error)
        await self._remove_all_but(stamps)
        self._first = False

    async def _remove_all_but(self, present: dict[str, Stamp]) -> None:
        now, missing = time.monotonic(), self._missing
        names = [adapter.name for adapter in self._catalog.list_owned(self._owner) if adapter.name not in present]
        self._missing = {name: missing.get(name, now) for name in names}
        for name, since in self._missing.items():
            if self._first or now - since >= _QUIET_S:
                await self._catalog.remove_watched(name)
                self._seen.pop(name, None)
                logger.info({"adapter": name, "removed": "its watched folder is gone"})

    def _stamps(self) -> dict[str, Stamp] | None:
        """Each sub-folder with the times of change of its files; None for a folder that can't be read now."""
        try:
            names = sorted(path.name for path in self._folder.iterdir() if not path.name.startswith("."))
        except OSError as error:
            logger.debug("the watched folder can't be read: %s", error)
            return None
        return {name: stamp for name in names if (stamp := _stamp(self._folder / name)) is not None}


def _stamp(folder: Path) -> Stamp | None:
    """None for what is no folder."""
    try:
        if not folder.is_dir():
            return None
        if not (folder / "adapter_config.json").is_file():
            return ()
        return folder.stat().st_mtime, *(file.stat().st_mtime for file in sorted(folder.rglob("*")) if file.exists())
    except OSError:
        return ()
