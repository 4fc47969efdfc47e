"""Which tokens are computed in the next step: continuous batching, one iteration at a time, in pure Python.

There is no prefill and no decode here. A sequence has tokens whose keys and values are not computed yet (a new one
all of its prompt, a running one the token drawn last, a preempted one everything again), and each step hands out a
budget of tokens: to running sequences first, then to waiting ones in the policy's order. A step can be planned while
the one before is under way: its tokens are counted as drawn, and filled in by `update`.

    waiting ──admit: pages for all known tokens, adapter pinned──▶ running ──finish──▶ gone
       ▲                                                              │
       └──────── preempt: one the policy chooses, when pages run out ─┘
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Literal, Protocol

from peftkit.errors import AdapterError, InputError
from peftkit_serve.pages import PAGE_TOKENS, PageAllocator, pages_behind, pages_for, text_room
from peftkit_serve.plan import Chunk, StepPlan, StepResult
from peftkit_serve.sequence import Residence, Sequence

__all__ = ["AdapterLeases", "ArrivalOrder", "Policy", "Residence", "Scheduler", "Sequence"]


class AdapterLeases(Protocol):
    """What the scheduler asks of the adapter pool; adapters are named by uid.

    A *reference* is held from `add` to the end of a request: the adapter is not freed before. A *pin* is held while
    the request runs: its slot or prefix is neither moved nor evicted. A preempted request keeps the reference only.
    """

    def retain(self, uid: str) -> None:
        """Takes a reference."""
        ...

    def release(self, uid: str) -> None:
        """Gives a reference back."""
        ...

    def pin(self, uid: str) -> Residence | None:
        """Makes the adapter resident and pins it; None while that can't be yet, AdapterError when it never can."""
        ...

    def unpin(self, uid: str) -> None:
        """Gives a pin back."""
        ...

    def num_pages_to_pin(self, uid: str) -> int:
        """Free pages that `pin` would take now; 0 without a prefix and for a resident one."""
        ...

    def reclaim(self, num_pages: int, keep: str | None) -> bool:
        """Evicts prefixes that nobody pins, save `keep`'s, to free `num_pages`; False, and none, if they hold less."""
        ...


class Policy(Protocol):
    """Whose turn it is. The scheduler asks it; pages, slots and the token budget stay the scheduler's."""

    def joined(self, sequence: Sequence) -> None:
        """A request has come."""
        ...

    def queued(self, sequence: Sequence) -> None:
        """It waits: it has come, or lost its place."""
        ...

    def dequeued(self, sequence: Sequence) -> None:
        """It waits no longer: it has a place, or can't have one, or ends."""
        ...

    def left(self, sequence: Sequence) -> None:
        """It has ended."""
        ...

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        """Tokens of it were computed for the first time."""
        ...

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The waiting ones, the next one first."""
        ...

    def victim(self, running: Iterable[Sequence], waiting: Iterable[Sequence], max_requests: int) -> Sequence | None:
        """A running one that should wait again, for the sake of the next waiting one, if that can't be placed."""
        ...

    def sacrifice(self, candidates: Items[Sequence], running: Iterable[Sequence]) -> Sequence:
        """Which of these running ones, in order of arrival, waits again when pages run out."""
        ...


class ArrivalOrder:
    """The highest priority first; of equals, first come, first served."""

    def joined(self, sequence: Sequence) -> None: ...

    def queued(self, sequence: Sequence) -> None: ...

    def dequeued(self, sequence: Sequence) -> None: ...

    def left(self, sequence: Sequence) -> None: ...

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None: ...

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        return iter(sorted(waiting, key=_rank))

    def victim(self, running: Iterable[Sequence], waiting: Iterable[Sequence], max_requests: int) -> Sequence | None:
        return None

    def sacrifice(self, candidates: Items[Sequence], running: Iterable[Sequence]) -> Sequence:
        return max(candidates, key=_rank)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.priority, sequence.arrival


class Scheduler:
    """Owns the sequences and what they hold. Nothing here is thread safe: one thread drives it."""

    def __init__(
        self,
        pages: PageAllocator,
        adapters: AdapterLeases,
        *,
        max_tokens_per_step: int,
        max_requests: int,
        max_bypass: int = 32,
        max_wait_steps: int = 1024,
        prefix_cache: bool = True,
        policy: Policy | None = None,
    ) -> None:
        """
        max_tokens_per_step: token budget of a step; at least `max_requests`, so that every running sequence advances.
        max_requests: most sequences running at a time.
        max_bypass: how many later ones may be admitted before one whose adapter is not ready.
        max_wait_steps: for how many steps later ones may be; after that running ones end and give their adapters up.
        prefix_cache: what was computed for an adapter, a tenant and tokens is shared by who needs the same.
        policy: which waiting one is next; None for the highest priority, then the first to come.
        """
        if max_tokens_per_step < max_requests:
            raise InputError(
                f"max_tokens_per_step is {max_tokens_per_step}: it must be at least max_requests, {max_requests}",
                field="max_tokens_per_step",
            )
        self._pages = pages
        self._adapters = adapters
        self._max_tokens = max_tokens_per_step
        self._max_requests = max_requests
        self._max_bypass = max_bypass
        self._max_wait_steps = max_wait_steps
        self._prefix_cache = prefix_cache
        self._policy: Policy = policy or ArrivalOrder()
        self._coming: Counter[bytes] = Counter()  # names of pages that running ones compute
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # both by arrival
        self._waiting: list[Sequence] = []
        self._rejected: list[tuple[Sequence, AdapterError]] = []
        self._num_arrivals = self._num_steps = 0
        self.num_preemptions = self.num_cached_tokens = 0

    @property
    def running(self) -> Items[Sequence]:
        """Sequences that hold pages, by arrival."""
        return self._running

    @property
    def waiting(self) -> Items[Sequence]:
        """Sequences that hold no page, by arrival."""
        return self._waiting

    def has_work(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(self._sequences)

    def get(self, request_id: str) -> Sequence | None:
        """The sequence of a request that has not ended."""
        return self._sequences.get(request_id)

    def of(self, chunk: Chunk) -> Sequence | None:
        """The sequence that a chunk is a share of, if it has not ended."""
        sequence = self._sequences.get(chunk.request_id)
        return None if sequence is None or sequence.arrival != chunk.arrival else sequence

    def needs_tokens(self) -> bool:
        """Whether a running sequence can't go on before the tokens of the step under way are known."""
        return any(sequence.needs_tokens for sequence in self._running)

    def max_text_tokens(self, num_virtual: int) -> int:
        """Most text tokens, prompt and generated, that the pages hold for one request that is alone."""
        return text_room(self._pages.num_pages, num_virtual)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence and takes its adapter reference. InputError when the pages could never hold it."""
        assert sequence.request_id not in self._sequences and sequence.num_generated == 0
        most = self.max_text_tokens(sequence.num_virtual)
        if sequence.num_prompt + sequence.params.max_tokens > most:
            raise InputError(
                f"the prompt has {sequence.num_prompt} tokens and max_tokens is {sequence.params.max_tokens}: "
                f"together they must not pass the {most} tokens that the KV memory holds",
                field="prompt",
            )
        if sequence.uid is not None:
            self._adapters.retain(sequence.uid)
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)
        self._policy.joined(sequence)
        self._policy.queued(sequence)

    def schedule(self) -> StepPlan:
        """Plans a step. The plan's chunks never pass the token budget and always stand in pages of their own."""
        self._num_steps += 1
        self._yield_places()
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        budget = self._max_tokens
        num_preemptions = self.num_preemptions
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            if sequence.is_drawn:
                position += 1
                continue
            if not self._grow(sequence, position):
                continue
            position += 1
            reserved = len(self._running) - position  # a token for each one behind: a long prompt stalls nobody
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget - reserved)
            chunks.append(sequence.take(num_tokens))
            budget -= num_tokens
        if self.num_preemptions == num_preemptions:
            self._admit(budget, chunks, copies)
        return StepPlan(tuple(chunks), tuple(copies))

    def update(self, sequence: Sequence, chunk: Chunk, result: StepResult) -> bool:
        """Books a sequence's share of a step, in the order of steps; whether it drew a token, the last of `token_ids`.

        One whose draw is -1 is left as it is, for the caller to end.
        """
        token_id = -1 if chunk.sample is None else result.tokens[chunk.request_id]
        sequence.num_ahead -= chunk.sample is not None
        self._name_pages(sequence, chunk)
        known = min(chunk.start - chunk.num_virtual + len(chunk.token_ids), sequence.num_prompt)
        num_new = max(0, known - sequence.num_charged)
        sequence.num_charged += num_new
        if token_id >= 0:
            sequence.token_ids.append(token_id)
        if num_new or token_id >= 0:
            self._policy.served(sequence, num_new, int(token_id >= 0))
        return token_id >= 0

    def take_rejected(self) -> list[tuple[Sequence, AdapterError]]:
        """Sequences that `schedule` found can't run, because their adapter can't. The caller ends them."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def finish(self, request_id: str) -> None:
        """Ends a request, whatever the reason, and gives back all it holds, exactly once: the only place that does."""
        sequence = self._sequences.pop(request_id)
        if sequence.residence is not None:
            self._vacate(sequence)
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._policy.dequeued(sequence)
        if sequence.uid is not None:
            self._adapters.release(sequence.uid)
        self._policy.left(sequence)

    def check_integrity(self) -> Counter[int]:
        """Asserts the queues' invariants; returns how many of the sequences hold each page."""
        held: Counter[int] = Counter()
        queued = [*self._running, *self._waiting, *(sequence for sequence, _ in self._rejected)]
        assert len(queued) == len(self._sequences) and all(self._sequences[s.request_id] is s for s in queued)
        for queue in (self._running, self._waiting):
            assert all(a.arrival < b.arrival for a, b in pairwise(queue)), "a queue is out of order"
        assert sum(not sequence.is_drawn for sequence in self._running) <= self._max_requests
        for sequence in self._running:
            assert sequence.residence is not None
            assert 0 <= sequence.num_computed < sequence.num_tokens
            assert len(sequence.table) >= pages_for(sequence.num_virtual + sequence.num_computed)
            held.update(sequence.table)
        for sequence in self._waiting:
            assert sequence.residence is None and not sequence.table and sequence.num_computed == 0
        coming = Counter(key for sequence in self._running for key in sequence.coming)
        assert dict(self._coming) == dict(coming), "names of pages that nobody computes are kept"
        return held

    def _grow(self, sequence: Sequence, position: int) -> bool:
        """Takes the pages that a running sequence's known tokens need; False when it had to be preempted itself."""
        num_missing = pages_for(sequence.num_positions) - len(sequence.table)
        if num_missing <= 0:  # in most steps
            return True
        while self._pages.num_free < num_missing:
            if self._adapters.reclaim(num_missing - self._pages.num_free, None):
                continue
            victim = self._policy.sacrifice(self._running[position:], self._running)  # those before are planned
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.table += tuple(self._pages.take(num_missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting, with its generated tokens: they are computed again with the prompt."""
        self._vacate(sequence)
        self._running.remove(sequence)
        insort(self._waiting, sequence, key=lambda one: one.arrival)
        self._policy.queued(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self._pages.release(sequence.table)
        self._have_come(sequence.coming)
        sequence.table, sequence.coming = (), []
        sequence.num_computed = 0
        if sequence.num_scored < sequence.num_prompt - 1:  # the chunks of the next attempt may be cut elsewhere
            sequence.num_scored = 0
        sequence.residence = None
        if sequence.uid is not None:
            self._adapters.unpin(sequence.uid)

    def _yield_places(self) -> None:
        """Lets the policy take places and pages from some for the next one that waits, while it can't be placed."""
        while self._waiting:
            victim = self._policy.victim(self._running, self._waiting, self._max_requests)
            if victim is None:
                return
            following = next(iter(self._policy.order(self._waiting)))
            if len(self._running) < self._max_requests and self._has_pages(following, 0):
                return
            self._preempt(victim)

    def _admit(self, budget: int, chunks: list[Chunk], copies: list[tuple[int, int]]) -> None:
        """Admits waiting sequences in the policy's order while budget, places and pages last.

        One whose adapter is not ready is passed over, by at most `max_bypass` later ones and for `max_wait_steps`; one
        that lacks pages is never passed over, or a long prompt would wait for ever. One that begins as a running one
        does waits for what that computes.
        """
        passed: list[Sequence] = []
        unready: set[str | None] = set()
        if budget <= 0 or not self._waiting or len(chunks) >= self._max_requests:
            return
        for sequence in self._policy.order(tuple(self._waiting)):
            if len(passed) == self._max_bypass or any(self._is_overdue(one) for one in passed):
                break
            if sequence.num_ahead:  # preempted just now, while it draws
                break
            outcome = "unready" if sequence.uid in unready else self._place(sequence, copies)
            if outcome == "short":
                break
            if outcome == "coming":
                continue
            if outcome == "unready":
                unready.add(sequence.uid)
                passed.append(sequence)
                if sequence.first_passed < 0:
                    sequence.first_passed = self._num_steps
                continue
            self._waiting.remove(sequence)
            self._policy.dequeued(sequence)
            if outcome == "rejected":
                continue
            for one in passed:
                one.num_bypassed += 1
            insort(self._running, sequence, key=lambda one: one.arrival)
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget)
            chunks.append(sequence.take(num_tokens))
            budget -= num_tokens
            if budget <= 0 or len(chunks) >= self._max_requests:
                break

    def _is_overdue(self, passed: Sequence) -> bool:
        return passed.num_bypassed >= self._max_bypass or self._num_steps - passed.first_passed >= self._max_wait_steps

    def _place(
        self, sequence: Sequence, copies: list[tuple[int, int]]
    ) -> Literal["placed", "short", "coming", "unready", "rejected"]:
        """Pins a waiting sequence's adapter and takes pages for all its known tokens, or takes nothing."""
        found = self._find_pages(sequence)
        if found is None:
            return "coming"
        outcome, residence = self._pin(sequence, len(found))
        if residence is None:
            self._pages.release(found)
            return outcome
        assert residence.prefix.num_tokens == sequence.num_virtual
        sequence.residence = residence
        table, to_copy = self._pages.fork(residence.prefix, sequence.num_positions, found)
        sequence.table = tuple(table)
        copies.extend(to_copy)
        if found:
            sequence.num_computed = PAGE_TOKENS * (sequence.first_page + len(found)) - sequence.num_virtual
            sequence.num_charged = max(sequence.num_charged, min(sequence.num_computed, sequence.num_prompt))
            self.num_cached_tokens += sequence.num_computed
        if self._prefix_cache:
            sequence.coming = sequence.page_keys(len(sequence.token_ids))[len(found) :]
            self._coming.update(sequence.coming)
        return "placed"

    def _pin(
        self, sequence: Sequence, num_found: int
    ) -> tuple[Literal["placed", "short", "unready", "rejected"], Residence | None]:
        """Where a waiting sequence's adapter is, if it and the pages can be had; else why not."""
        if not self._has_pages(sequence, num_found):
            return "short", None
        if sequence.uid is None:
            return "placed", Residence()
        try:
            residence = self._adapters.pin(sequence.uid)
        except AdapterError as error:
            self._rejected.append((sequence, error))
            return "rejected", None
        return "unready" if residence is None else "placed", residence

    def _find_pages(self, sequence: Sequence) -> list[int] | None:
        """Takes references of the pages that hold the beginning of its tokens; at least one token is left to compute.

        None while a running sequence computes pages that it would begin with: they need not be computed twice.
        """
        if not self._prefix_cache or sequence.params.prompt_logprobs is not None:
            return []
        if sequence.awaited in self._coming:
            return None
        keys = sequence.page_keys(len(sequence.token_ids) - 1)
        found = self._pages.share(keys)
        for key in keys[len(found) :]:
            if key not in self._coming:
                break
            sequence.awaited = key
        if sequence.awaited in self._coming:
            self._pages.release(found)
            return None
        return found

    def _have_come(self, keys: Items[bytes]) -> None:
        self._coming.subtract(keys)
        for key in keys:
            if not self._coming[key]:
                del self._coming[key]

    def _name_pages(self, sequence: Sequence, chunk: Chunk) -> None:
        """Pages that a step has filled are found by what they hold, if the sequence still has them."""
        first, end = max(chunk.start // PAGE_TOKENS, sequence.first_page), chunk.start + len(chunk.token_ids)
        last = end // PAGE_TOKENS
        if not self._prefix_cache or first >= last or sequence.table[:last] != chunk.block_table[:last]:
            return
        keys = sequence.page_keys(end - sequence.num_virtual)
        for number in range(first, last):
            key = keys[number - sequence.first_page]
            self._pages.name(sequence.table[number], key)
            if sequence.coming and sequence.coming[0] == key:
                self._have_come((sequence.coming.pop(0),))

    def _has_pages(self, sequence: Sequence, num_found: int) -> bool:
        """Whether the pages that a waiting sequence needs are free, or could be made so.

        num_found: those that it shares. One page for each running sequence stays free, so that admitting this one does
        not at once preempt another.
        """
        num_needed = pages_behind(sequence.num_virtual, sequence.num_positions) - num_found + len(self._running)
        if sequence.uid is not None:
            num_needed += self._adapters.num_pages_to_pin(sequence.uid)
        num_missing = num_needed - self._pages.num_free
        return num_missing <= 0 or self._adapters.reclaim(num_missing, sequence.uid)
