"""What is known of tenants, keys and adapters at one moment: frozen data, as read from the database."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

SHARED = ""
"""The owner of adapters that belong to the operator and can be opened to tenants."""
_WATCHED = "/"
"""How an owner begins that is a folder: no tenant can be called so."""


def owner_of_watched(folder: Path) -> str:
    """The owner of the adapters that a watched folder brings, which are shared too."""
    return _WATCHED + hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()


def tenant_of(owner: str) -> str | None:
    """The tenant that an owner is; None for the owners of shared adapters."""
    return None if owner == SHARED or owner.startswith(_WATCHED) else owner


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use; None is without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and generated tokens together."""
    max_concurrency: int | None = None
    """Answers being generated or waited for at a time."""
    max_queue: int | None = 256
    """Of these, those that wait for their first token."""
    max_adapters: int | None = None
    """Names of the tenant's own."""
    max_adapter_bytes: int | None = None
    """Bytes on disk of all their versions."""
    weight: float = 1.0
    """The tenant's share of a busy engine relative to others'."""

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """Limits as they were stored, perhaps by an older version; its missing fields have their defaults."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in known})

    def plain(self) -> dict[str, Any]:
        """As they are stored."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Key:
    """A key that can be used."""

    id: str
    tenant: str | None
    """None: an admin key."""
    salt: bytes
    digest: bytes
    created: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant."""

    name: str
    limits: Limits
    adapters: tuple[str, ...]
    """Patterns of the shared adapters that it may name, as of shells: "*" is all."""
    created: float

    def may_name(self, adapter: str) -> bool:
        """Whether a shared adapter is open to it."""
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters)


@dataclass(frozen=True, slots=True)
class Version:
    """One adapter's content under its name; never changes."""

    number: int
    digest: str
    """SHA-256 over the files: the name of the folder that holds them, and of the adapter in the engine."""
    uid: str
    kind: str
    rank: int
    num_virtual: int
    nbytes: int
    """Of its files."""
    template: str | None
    """The chat template that it brings."""
    created: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A name with its versions, and where requests for the bare name go."""

    owner: str
    name: str
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    weights: dict[int, float] = field(default_factory=dict[int, float])
    """Version → share of the requests; sums to 1."""
    history: tuple[dict[int, float], ...] = ()
    """Earlier weights, the latest last: where rollback goes."""

    @property
    def tenant(self) -> str | None:
        """Whose it is; None for a shared one."""
        return tenant_of(self.owner)

    @property
    def watched(self) -> bool:
        """Whether it comes from a watched folder."""
        return self.owner.startswith(_WATCHED)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything, as of one revision."""

    revision: int = -1
    tenants: dict[str, Tenant] = field(default_factory=dict[str, Tenant])
    keys: dict[str, Key] = field(default_factory=dict[str, Key])
    """By id."""
    adapters: dict[tuple[str, str], Adapter] = field(default_factory=dict[tuple[str, str], Adapter])
    """By owner and name; those of one base."""

    def owned(self, owner: str) -> list[Adapter]:
        """An owner's adapters by name."""
        return [adapter for (who, _), adapter in sorted(self.adapters.items()) if who == owner]

    def references(self, digest: str) -> int:
        """Versions with this content, under all names."""
        return sum(one.digest == digest for adapter in self.adapters.values() for one in adapter.versions.values())
