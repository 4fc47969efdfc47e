"""One request as the scheduler keeps it: its tokens, how far they are computed, and what it holds. Pure Python."""

import collections.abc as abc
from array import array
from dataclasses import dataclass, field

from peftkit_serve.pages import NO_PREFIX, PAGE_TOKENS, Prefix, page_key, root_key
from peftkit_serve.plan import UNKNOWN, Chunk, Constraint, Sample
from peftkit_serve.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a resident adapter stands: what a chunk of its requests is computed with."""

    slot: int = -1
    """Slot of its LoRA or bottleneck weights; -1 is the bare base."""
    prefix: Prefix = NO_PREFIX
    """Virtual tokens at the head of the block table; empty for an adapter without."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way: its tokens, how far they are computed, and what it holds."""

    request_id: str
    token_ids: list[int]
    """Prompt, then generated tokens."""
    num_prompt: int
    params: SamplingParams
    """`max_tokens` is what the request may really generate."""
    seed: int
    uid: str | None = None
    num_virtual: int = 0
    """Virtual tokens of its adapter."""
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    constraint: Constraint | None = None
    arrival: int = -1
    num_ahead: int = 0
    """Tokens that steps under way draw: they come behind `token_ids` and are not known yet."""
    num_computed: int = 0
    """Tokens whose keys and values are in the pages, or will be when the steps under way are done."""
    num_charged: int = 0
    """Tokens of the prompt that were computed at least once."""
    num_scored: int = 0
    """Prompt tokens after the first whose log-probabilities were asked for and computed, likewise."""
    num_bypassed: int = 0
    """Later arrivals that were admitted while its adapter was not ready."""
    first_passed: int = -1
    """The step whose turn it missed first because of that; -1 for none."""
    table: tuple[int, ...] = ()
    """Its pages in order of position; the same object until one is added, so that its chunks share it."""
    residence: Residence | None = None
    """Set while running."""
    coming: list[bytes] = field(default_factory=list[bytes])
    """Names of the pages that it computes of the tokens that it was admitted with, those left."""
    awaited: bytes = b""
    """Name of the last page that it shares with a running sequence which computes it, while it waits for that."""
    _keys: list[bytes] = field(default_factory=list[bytes])
    _history: "array[int]" = field(default_factory=lambda: array("q"))
    """`token_ids` as 64-bit integers, as far as penalties have needed them."""

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, those under way included."""
        return len(self.token_ids) + self.num_ahead

    @property
    def num_positions(self) -> int:
        """Positions that the pages must hold: virtual tokens and all other tokens."""
        return self.num_virtual + self.num_tokens

    @property
    def is_drawn(self) -> bool:
        """Whether all tokens that it may have are generated or under way: nothing is left to compute."""
        return self.num_generated + self.num_ahead >= self.params.max_tokens

    @property
    def needs_tokens(self) -> bool:
        """Whether its next token can't be drawn before the last one is known on the host."""
        return self.num_ahead > 0 and self.constraint is not None

    @property
    def first_page(self) -> int:
        """Number of its pages that hold virtual tokens alone: they are the adapter's."""
        return self.num_virtual // PAGE_TOKENS

    def page_keys(self, num_tokens: int) -> list[bytes]:
        """Names of the pages from `first_page` on that its first `num_tokens` tokens fill."""
        count = (self.num_virtual + num_tokens) // PAGE_TOKENS - self.first_page
        while len(self._keys) < count:
            end = (self.first_page + len(self._keys) + 1) * PAGE_TOKENS - self.num_virtual
            parent = self._keys[-1] if self._keys else root_key(self.uid, self.tenant)
            self._keys.append(page_key(parent, self.token_ids[max(0, end - PAGE_TOKENS) : end]))
        return self._keys[:count]

    def take(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens to compute; from now on they are under way."""
        assert self.residence is not None and 0 < num_tokens
        start, end = self.num_computed, self.num_computed + num_tokens
        known = self.token_ids[start:end]
        scored = self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1
        chunk = Chunk(
            request_id=self.request_id,
            token_ids=(*known, *(UNKNOWN,) * (num_tokens - len(known))),
            start=self.num_virtual + start,
            block_table=self.table,
            slot=self.residence.slot,
            num_virtual=self.num_virtual,
            sample=self._sample() if end == self.num_tokens else None,
            targets=tuple(self.token_ids[start + 1 : min(end + 1, self.num_prompt)]) if scored else (),
            num_top_targets=self.params.prompt_logprobs or 0,
            arrival=self.arrival,
        )
        self.num_computed = end
        self.num_scored += len(chunk.targets)
        self.num_ahead += chunk.sample is not None
        return chunk

    def history(self) -> abc.Sequence[int]:
        """Prompt and generated tokens that are known, where penalties need them."""
        if not self.params.has_penalties:
            return ()
        self._history.extend(self.token_ids[len(self._history) :])
        return self._history[:]

    def _sample(self) -> Sample:
        return Sample(self.params, self.seed, self.num_generated + self.num_ahead, self.history(), self.constraint)
