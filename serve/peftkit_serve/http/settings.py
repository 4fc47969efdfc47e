"""What a server is started with, beside its engine."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds and places of one server."""

    store: Path | None = None
    """Where uploaded adapters are kept; None is a folder that ends with the process."""
    database: str | None = None
    """SQLAlchemy's address of the state; None is a file in `store`."""
    adapter_roots: tuple[Path, ...] = ()
    """Folders from which adapters may be registered by path; none where it is empty."""
    watched: Path | None = None
    """A folder whose sub-folders are adapters, shared under the folders' names, as they come and change."""
    open_admin: bool = True
    """Whether administration needs no key while there is none: only for a server that nobody else can reach."""
    require_key: bool = False
    """Whether inference needs a key even while there is no tenant."""
    max_body_bytes: int = 8 * 2**20
    """Of a request that isn't an upload."""
    max_upload_bytes: int = 2 * 2**30
    """Of one adapter's files."""
    body_timeout_s: float = 60.0
    """From a request's arrival to the end of its body; an upload's has `request_timeout_s`."""
    max_waiting: int = 1024
    """Answers that may wait for their first token, of all tenants."""
    host_bytes: int = 8 * 2**30
    """Host memory for adapters that no request uses at the moment."""
    request_timeout_s: float = 600.0
    """From a request's arrival to its end."""
    queue_timeout_s: float = 120.0
    """From a request's arrival to its first token."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on after the first SIGTERM or SIGINT."""
    poll_s: float = 0.5
    """How often the state is compared with the database's, and the watched folder is looked at."""
