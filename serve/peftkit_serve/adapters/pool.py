"""Which adapters are resident: weights in slots, virtual tokens as read-only pages at the head of block tables.

A LoRA or bottleneck adapter has weights, an adapter of the prompt family has virtual tokens; one may have both.

Everything is keyed by uid, so an adapter that two names point to is resident once and a name that comes back with
other content never meets the old weights. An adapter is held by three counts:

    names       live names that point to it; without one it drains
    references  requests that have not ended; with neither names nor references it is gone, its memory freed
    pins        requests that are running; while there is one, its slot or pages are neither moved nor evicted

Weights set out for the device as soon as a request is queued, where there is room that no other request's adapter has;
else when its turn comes. What makes room is the least recently used: of what no request needs first.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from peftkit.errors import AdapterError
from peftkit_serve.adapters.loader import LoadedAdapter
from peftkit_serve.adapters.memory import AdapterMemory
from peftkit_serve.adapters.packing import PackedAdapter
from peftkit_serve.pages import NO_PREFIX, PageAllocator, Prefix, pages_for
from peftkit_serve.scheduler import Residence

logger = logging.getLogger(__name__)

PoolState = Literal["ready", "failed", "draining"]


class PrefixWriter(Protocol):
    """Who brings virtual tokens into the pages of a block table."""

    def compute_prefix(self, embeddings_VH: Tensor, block_table: Sequence[int], slot: int = -1) -> None:
        """Computes the keys and values of virtual tokens, with a slot's weights."""
        ...

    def write_prefix(self, kv_VL2KD: Tensor, block_table: Sequence[int]) -> None:
        """Writes given keys and values."""
        ...


@dataclass(slots=True, eq=False)
class _Member:
    """An adapter in the pool."""

    loaded: LoadedAdapter
    num_names: int = 0
    num_references: int = 0
    num_pins: int = 0
    residence: Residence | None = None
    last_use: int = 0
    failed: bool = False
    """Whether the last attempt to make it resident raised; the next one may succeed."""


class AdapterPool:
    """Residency of adapters; the scheduler's `AdapterLeases`. Used on the thread that steps."""

    def __init__(
        self,
        memory: AdapterMemory,
        pages: PageAllocator,
        prefixes: PrefixWriter,
        *,
        num_slots: int,
    ) -> None:
        """num_slots: adapters with weights that can be resident at a time."""
        self._memory = memory
        self._pages = pages
        self._prefixes = prefixes
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._members: dict[str, _Member] = {}
        self._resident: dict[str, _Member] = {}
        self._wanted: dict[str, None] = {}  # uids with requests and no place yet, the first to come first
        self._num_uses = 0

    def add_name(self, loaded: LoadedAdapter) -> None:
        """One more name points to this adapter."""
        self._members.setdefault(loaded.uid, _Member(loaded)).num_names += 1

    def drop_name(self, uid: str) -> None:
        """One name less; without any, the adapter is freed as soon as its last request has ended."""
        member = self._members[uid]
        assert member.num_names > 0
        member.num_names -= 1
        self._forget_if_unused(member)

    def retain(self, uid: str) -> None:
        """Takes a request's reference."""
        member = self._members[uid]
        member.num_references += 1
        if member.residence is None:
            self._wanted.setdefault(uid)
            self._prefetch()

    def release(self, uid: str) -> None:
        """Gives a request's reference back."""
        member = self._members[uid]
        assert member.num_references > member.num_pins
        member.num_references -= 1
        if not member.num_references:
            self._wanted.pop(uid, None)
        self._forget_if_unused(member)
        self._prefetch()

    def num_pages_to_pin(self, uid: str) -> int:
        """Free pages that `pin` would take now: those of virtual tokens that are not resident."""
        member = self._members[uid]
        return pages_for(member.loaded.num_virtual) if member.residence is None else 0

    def pin(self, uid: str) -> Residence | None:
        """Makes an adapter resident, if it isn't, and holds it there.

        None when every slot, or too much adapter memory, is pinned by others. Raises AdapterError when the device
        fails at it. The caller has seen that `num_pages_to_pin` pages are free.
        """
        member = self._members[uid]
        if member.residence is None:
            residence = self._load(member)
            if residence is None:
                return None
            self._settle(member, residence)
        member.num_pins += 1
        self._touch(member)
        return member.residence

    def unpin(self, uid: str) -> None:
        """Gives a pin back. The adapter stays resident until its place is needed."""
        member = self._members[uid]
        assert member.num_pins > 0
        member.num_pins -= 1
        self._touch(member)

    def reclaim(self, num_pages: int, keep: str | None) -> bool:
        """Frees `num_pages` pages by evicting prefixes that nobody pins, save `keep`'s, the least recently used first.

        Returns False, and evicts none, when they hold fewer pages.
        """
        chosen: list[_Member] = []
        num_missing = num_pages
        for member in self._evictable():
            if member.loaded.num_virtual and num_missing > 0 and member.loaded.uid != keep:
                chosen.append(member)
                num_missing -= pages_for(member.loaded.num_virtual)
        if num_missing > 0:
            return False
        for member in chosen:
            self._evict(member)
        return True

    def state(self, uid: str) -> PoolState | None:
        """None for an adapter that is gone."""
        member = self._members.get(uid)
        if member is None:
            return None
        if member.num_names == 0:
            return "draining"
        return "failed" if member.failed else "ready"

    def is_resident(self, uid: str) -> bool:
        """Whether its weights or pages are on the device."""
        member = self._members.get(uid)
        return member is not None and member.residence is not None

    def num_references(self, uid: str) -> int:
        """Requests that have not ended."""
        member = self._members.get(uid)
        return 0 if member is None else member.num_references

    @property
    def resident(self) -> Collection[str]:
        """Uids of the adapters on the device."""
        return self._resident.keys()

    @property
    def num_resident(self) -> int:
        """Adapters on the device."""
        return len(self._resident)

    def check_integrity(self, references: Mapping[str, int], pins: Mapping[str, int]) -> Counter[int]:
        """Asserts all counts against those of the scheduler's sequences, by uid; returns the pages prefixes hold."""
        held: Counter[int] = Counter()
        slots = list(self._free_slots)
        for uid, member in self._members.items():
            assert member.num_references == references.get(uid, 0) and member.num_pins == pins.get(uid, 0)
            assert member.num_names or member.num_references, "an adapter that nobody needs is kept"
            assert member.residence is not None or not member.num_pins
            assert uid not in self._wanted or (member.residence is None and member.num_references)
            assert (member.residence is not None) == (uid in self._resident)
            if member.residence is not None:
                held.update(member.residence.prefix.pages)
                slots += [] if member.loaded.weights is None else [member.residence.slot]
        assert set(references) | set(pins) <= set(self._members), "a request's adapter is gone"
        assert set(self._wanted) <= set(self._members), "an adapter that is gone is waited for"
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or has two adapters"
        self._memory.check_integrity()
        return held

    def _load(self, member: _Member) -> Residence | None:
        """Brings weights into a slot and virtual tokens into pages; None, and nothing held, without a slot for them."""
        slot = -1
        if member.loaded.weights is not None:
            slot = self._load_weights(member, member.loaded.weights)
            if slot < 0:
                return None
        try:
            return Residence(slot, self._load_prefix(member, slot))
        except AdapterError:
            if slot >= 0:
                self._free_slot(slot)
            raise

    def _prefetch(self) -> None:
        """Sends waiting requests' weights to the device, in order of arrival, while there is room for them.

        Virtual tokens take KV pages, so an adapter that has some comes with its turn.
        """
        for uid in list(self._wanted):
            member = self._members[uid]
            weights = member.loaded.weights
            if weights is not None and not member.loaded.num_virtual:
                try:
                    slot = self._load_weights(member, weights, beside_waiting=True)
                except AdapterError:  # logged; its turn brings the next attempt, and the answer if that fails too
                    slot = None
                if slot == -1:
                    return
                if slot is not None:
                    self._settle(member, Residence(slot))
            self._wanted.pop(uid, None)

    def _load_weights(self, member: _Member, weights: PackedAdapter, *, beside_waiting: bool = False) -> int:
        """The slot that they are in; -1 when every slot, or too much memory, is pinned by others.

        beside_waiting: leave those alone too that waiting requests need.
        """
        evictable = [
            other
            for other in self._evictable()
            if other.loaded.weights is not None and not (beside_waiting and other.num_references)
        ]
        num_evictable_bytes = sum(_weight_bytes(other) for other in evictable)
        if not (self._free_slots or evictable) or not self._memory.fits(weights.nbytes - num_evictable_bytes):
            return -1
        while not self._free_slots or not self._memory.fits(weights.nbytes):
            self._evict(evictable.pop(0))
        slot = self._free_slots[-1]
        self._attempt(member, lambda: self._memory.load(slot, weights))
        return self._free_slots.pop()

    def _load_prefix(self, member: _Member, slot: int) -> Prefix:
        loaded = member.loaded
        if not loaded.num_virtual:
            return NO_PREFIX
        pages = self._pages.take(pages_for(loaded.num_virtual))
        embeddings_VH, kv_VL2KD = loaded.embeddings_VH, loaded.kv_VL2KD
        try:
            if embeddings_VH is not None:
                self._attempt(member, lambda: self._prefixes.compute_prefix(embeddings_VH, pages, slot))
            if kv_VL2KD is not None:
                self._attempt(member, lambda: self._prefixes.write_prefix(kv_VL2KD, pages))
        except AdapterError:
            self._pages.release(pages)
            raise
        return Prefix(tuple(pages), loaded.num_virtual)

    def _attempt(self, member: _Member, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever the device raises is this adapter's failure, not the engine's
            member.failed = True
            logger.exception("adapter %s can't be made resident", member.loaded.uid)
            raise AdapterError(f"the adapter can't be made resident: {type(error).__name__}") from error
        member.failed = False

    def _evictable(self) -> list[_Member]:
        """Resident adapters that nobody pins, those first that no request needs, then the least recently used first."""
        members = [one for one in self._resident.values() if not one.num_pins]
        return sorted(members, key=lambda member: (member.num_references > 0, member.last_use))

    def _settle(self, member: _Member, residence: Residence) -> None:
        member.residence = residence
        self._resident[member.loaded.uid] = member
        self._wanted.pop(member.loaded.uid, None)
        self._touch(member)

    def _evict(self, member: _Member) -> None:
        assert member.residence is not None and not member.num_pins
        del self._resident[member.loaded.uid]
        if member.loaded.weights is not None:
            self._free_slot(member.residence.slot)
        self._pages.release(member.residence.prefix.pages)
        member.residence = None
        if member.num_references:
            self._wanted.setdefault(member.loaded.uid)

    def _free_slot(self, slot: int) -> None:
        self._memory.free(slot)
        self._free_slots.append(slot)

    def _forget_if_unused(self, member: _Member) -> None:
        if member.num_names or member.num_references:
            return
        if member.residence is not None:
            self._evict(member)
        del self._members[member.loaded.uid]

    def _touch(self, member: _Member) -> None:
        self._num_uses += 1
        member.last_use = self._num_uses


def _weight_bytes(member: _Member) -> int:
    return 0 if member.loaded.weights is None else member.loaded.weights.nbytes
