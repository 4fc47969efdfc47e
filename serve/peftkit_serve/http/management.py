"""The bodies of the administrator's routes."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from peftkit_serve.adapters.store import AdapterEntry
from peftkit_serve.http.schemas import Body
from peftkit_serve.tenants.records import Adapter, Key, Limits, Tenant, Version
from peftkit_serve.tenants.shelf import Shelf, Tier

Count = Annotated[int, Field(ge=0, lt=2**53)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class AdapterByPath(Body):
    """`POST /v1/adapters` with a folder of the server's own."""

    name: str
    path: str
    """A folder under one of the roots that the server was started with."""
    tenant: str | None = None
    """Whose it is; left out, it is shared."""


class LoadLora(Body):
    """`POST /v1/load_lora_adapter`, as vLLM has it."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Whether a name that is there gets a new version."""
    is_3d_lora_weight: Literal[False] = False


class UnloadLora(Body):
    """`POST /v1/unload_lora_adapter`, as vLLM has it."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted without effect."""


class NewWeights(Body):
    """`POST /v1/adapters/{name}/aliases`."""

    weights: Annotated[dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], float], Field(min_length=1)]
    """Version → its share of the requests; shares are made to sum to 1."""


class LimitsBody(Body):
    """A tenant's limits; null is without limit."""

    requests_per_minute: Annotated[Count, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[Count, Field(ge=1)] | None = None
    max_concurrency: Annotated[Count, Field(ge=1)] | None = None
    max_queue: Count | None = Limits().max_queue
    max_adapters: Count | None = None
    max_adapter_bytes: Count | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0

    def limits(self) -> Limits:
        """As records have them."""
        return Limits(**self.model_dump())


class NewTenant(Body):
    """`POST /v1/tenants`."""

    name: Name
    adapters: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=1000)] = Field(
        default_factory=lambda: ["*"]
    )
    """Patterns of the shared adapters that it may name."""
    limits: LimitsBody = LimitsBody()


class ChangedTenant(Body):
    """`PATCH /v1/tenants/{name}`: what is left out stays."""

    adapters: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=1000)] | None = None
    limits: dict[str, Any] | None = None
    """The limits to change."""


class KeyCard(BaseModel):
    """A key, without what it is."""

    id: str
    created: float

    @classmethod
    def of(cls, key: Key) -> Self:
        return cls(id=key.id, created=key.created)


class ShownKey(BaseModel):
    """A key at the only moment when it is shown."""

    id: str
    key: str


class TenantCard(BaseModel):
    """A tenant."""

    name: str
    created: float
    adapters: list[str]
    limits: dict[str, int | float | None]
    keys: list[KeyCard]
    running: int
    """Answers under way."""
    waiting: int
    """Of these, those without a token yet."""

    @classmethod
    def of(cls, tenant: Tenant, keys: list[Key], running: int, waiting: int) -> Self:
        return cls(
            name=tenant.name,
            created=tenant.created,
            adapters=list(tenant.adapters),
            limits=tenant.limits.plain(),
            keys=[KeyCard.of(key) for key in keys],
            running=running,
            waiting=waiting,
        )


class TenantWithKey(TenantCard):
    """A new tenant with its first key, which is never shown again."""

    key: str


class TenantList(BaseModel):
    """The answer of `GET /v1/tenants`."""

    object: Literal["list"] = "list"
    data: list[TenantCard]


class VersionCard(BaseModel):
    """One version of an adapter."""

    version: int
    uid: str
    """SHA-256 over what it computes."""
    method: str
    rank: int
    num_virtual: int
    bytes: int
    """Of its files; in memory, for one that the server was started with."""
    created: float
    weight: float
    """Its share of the requests for the bare name."""
    tier: Tier
    """Where it is: on the device, in host memory, on disk."""
    references: int
    """Requests that use it."""
    last_use: float | None
    """Seconds since 1970, of this process; not known of one that the server was started with."""
    load_ms: float | None
    """How long it took to load, in this process."""

    @classmethod
    def of(cls, version: Version, weight: float, shelf: Shelf) -> Self:
        digest = version.digest
        return cls(
            version=version.number,
            uid=version.uid,
            method=version.kind,
            rank=version.rank,
            num_virtual=version.num_virtual,
            bytes=version.nbytes,
            created=version.created,
            weight=weight,
            tier=shelf.tier(digest),
            references=shelf.references(digest),
            last_use=shelf.last_use(digest),
            load_ms=shelf.load_ms(digest),
        )


class AdapterCard(BaseModel):
    """An adapter with its versions."""

    name: str
    tenant: str | None
    """null for a shared one."""
    state: Literal["ready"] = "ready"
    fixed: bool = False
    """Whether the server was started with it: then it can be neither changed nor removed."""
    watched: bool = False
    """Whether it comes from the watched folder: then new versions, and its removal, do too."""
    versions: list[VersionCard]

    @classmethod
    def of(cls, adapter: Adapter, shelf: Shelf) -> Self:
        shares = adapter.weights
        cards = [VersionCard.of(one, shares.get(one.number, 0.0), shelf) for one in adapter.versions.values()]
        return cls(name=adapter.name, tenant=adapter.tenant, watched=adapter.watched, versions=cards)

    @classmethod
    def fixed_one(cls, entry: AdapterEntry, created: float) -> Self:
        """One that the server was started with."""
        card = VersionCard(
            version=entry.version,
            uid=entry.uid,
            method=entry.kind,
            rank=entry.rank,
            num_virtual=entry.num_virtual,
            bytes=entry.nbytes,
            created=created,
            weight=1.0,
            tier="gpu" if entry.resident else "host",
            references=entry.references,
            last_use=None,
            load_ms=None,
        )
        return cls(name=entry.name, tenant=None, fixed=True, versions=[card])


class AdapterList(BaseModel):
    """The answer of `GET /v1/adapters`."""

    object: Literal["list"] = "list"
    data: list[AdapterCard]


class Published(VersionCard):
    """A version that has just come in."""

    name: str
    tenant: str | None


class Removed(BaseModel):
    """What removing an adapter freed."""

    name: str
    version: int | None
    freed_bytes: int
    """Of memory, without what other versions or adapters hold too."""
