"""Whose turn it is: virtual token counters for tenants, and within a tenant for its adapters, in pure Python.

After Sheng et al. 2024, "Fairness in Serving Large Language Models" (VTC), at two levels and with weights. A counter
is the service that its owner has had, a prompt's token at price 1 and a generated one at price 2, by its weight. The
waiting request of the owner with the lowest counter is next. Who begins to wait is lifted to the lowest counter of
those who wait, or when nobody does to that of who did last: nobody saves up turns, neither by a pause nor by having
something running all the time. And who has had more stays behind when its requests end: a counter is kept while it is
above where a new one would begin, an adapter's while its tenant has requests.

So the services of two who both wait all the time differ by at most 2 max(1 · L, 2 · M), for prompts of at most L tokens
and at most M tokens in all running requests; for two adapters if their requests have the same priority. It is work
conserving: no place is kept free.

Counters alone can't help who arrives when all places are taken by long answers of another. So a tenant that waits
and has less than its share of the places takes some from those who have more than theirs and have not had less.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from peftkit_serve.scheduler import Sequence

PROMPT_PRICE = 1.0
GENERATED_PRICE = 2.0
MAX_IDLE = 1024
"""Most counters that are kept for owners without requests: of tenants, and of the adapters of a tenant with some."""
_MIN_WEIGHT = 1e-6  # a smaller one's counter would outgrow the numbers that a float tells apart


@dataclass(slots=True)
class _Account:
    """One owner's counter and how many requests it has."""

    counter: float = 0.0
    weight: float = 1.0
    num_live: int = 0
    num_waiting: int = 0

    @property
    def turn(self) -> tuple[float, float]:
        """The lowest is next: who has had least, and of equals who has fewest places for its weight."""
        return self.counter, (self.num_live - self.num_waiting) / self.weight

    def charge(self, price: float) -> None:
        self.counter += price / self.weight


class _Accounts:
    """Those who share one thing: all tenants the engine, or one tenant's adapters what it gets."""

    def __init__(self) -> None:
        self._live: dict[str | None, _Account] = {}
        self._waiting: dict[str | None, _Account] = {}  # those of the live ones with a request that waits
        self._idle: dict[str | None, _Account] = {}
        self._last = _Account()  # who waited last

    def __getitem__(self, name: str | None) -> _Account:
        return self._live[name]

    def __contains__(self, name: str | None) -> bool:
        """Whether it has a request."""
        return name in self._live

    def joined(self, name: str | None, weight: float = 1.0) -> None:
        if name not in self._live:
            self._live[name] = self._idle.pop(name, None) or _Account()
        account = self._live[name]
        account.weight = max(_MIN_WEIGHT, weight)
        account.num_live += 1

    def queued(self, name: str | None) -> None:
        account = self._live[name]
        if not account.num_waiting:
            account.counter = max(account.counter, self._lowest())
            self._waiting[name] = account
        account.num_waiting += 1

    def dequeued(self, name: str | None) -> None:
        account = self._live[name]
        account.num_waiting -= 1
        if not account.num_waiting:
            self._last = self._waiting.pop(name)

    def left(self, name: str | None) -> None:
        account = self._live[name]
        account.num_live -= 1
        if not account.num_live:
            self._idle[name] = self._live.pop(name)
            if len(self._idle) > MAX_IDLE:
                self._forget()

    def _lowest(self) -> float:
        """Where a counter begins, and what it is lifted to. It never falls."""
        return min((account.counter for account in self._waiting.values()), default=self._last.counter)

    def _forget(self) -> None:
        """Drops idle counters that a new one would equal; if many are left, also those that are least above."""
        lowest = self._lowest()
        above = [(name, account) for name, account in self._idle.items() if account.counter > lowest]
        above.sort(key=lambda one: one[1].counter)
        self._idle = dict(above[-(MAX_IDLE // 2) :])  # half, so that the next time is as many requests away


class FairShare:
    """The scheduler's `Policy` of a server with tenants."""

    def __init__(self) -> None:
        self._tenants = _Accounts()
        self._adapters: dict[str, _Accounts] = {}  # of tenants that have a request

    def joined(self, sequence: Sequence) -> None:
        """A request has come."""
        self._tenants.joined(sequence.tenant, sequence.weight)
        self._adapters.setdefault(sequence.tenant, _Accounts()).joined(sequence.uid)

    def queued(self, sequence: Sequence) -> None:
        """It waits: it has come, or lost its place."""
        self._tenants.queued(sequence.tenant)
        self._adapters[sequence.tenant].queued(sequence.uid)

    def dequeued(self, sequence: Sequence) -> None:
        """It waits no longer."""
        self._tenants.dequeued(sequence.tenant)
        self._adapters[sequence.tenant].dequeued(sequence.uid)

    def left(self, sequence: Sequence) -> None:
        """It has ended, whatever ended it."""
        self._tenants.left(sequence.tenant)
        self._adapters[sequence.tenant].left(sequence.uid)
        if sequence.tenant not in self._tenants:
            del self._adapters[sequence.tenant]

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        """Tokens of it were computed for the first time."""
        price = PROMPT_PRICE * num_prompt + GENERATED_PRICE * num_generated
        self._tenants[sequence.tenant].charge(price)
        self._adapters[sequence.tenant][sequence.uid].charge(price)

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The waiting requests, the next one first; counters may move while it is read."""
        groups: dict[str, dict[str | None, list[Sequence]]] = {}
        for sequence in waiting:
            groups.setdefault(sequence.tenant, {}).setdefault(sequence.uid, []).append(sequence)
        for adapters in groups.values():
            for queue in adapters.values():
                queue.sort(key=lambda one: (one.priority, -one.arrival))  # the next one last
        while groups:
            tenant = min(groups, key=lambda name: (self._tenants[name].turn, _first(groups[name])))
            adapters, accounts = groups[tenant], self._adapters[tenant]
            uid = min(
                adapters, key=lambda one: (-adapters[one][-1].priority, accounts[one].turn, _oldest(adapters[one]))
            )
            yield adapters[uid].pop()
            if not adapters[uid]:
                del adapters[uid]
            if not adapters:
                del groups[tenant]

    def victim(self, running: Iterable[Sequence], waiting: Iterable[Sequence], max_requests: int) -> Sequence | None:
        """A running request that gives its place to the next one that waits; None for none.

        A tenant's share is its weight's part of the places. Its next request gets a place that another tenant has
        above its own share, as long as neither crosses its share by that: then the two can't take turns for ever. From
        one whose counter is lower nothing is taken: it would be next again at once.
        """
        waiting = list(waiting)
        places = Counter(sequence.tenant for sequence in running)
        following = next(self.order(waiting), None)
        names = {sequence.tenant for sequence in waiting} | set(places)
        if following is None or len(names) < 2:
            return None
        total = sum(self._tenants[name].weight for name in names)
        shares = {name: max(1.0, max_requests * self._tenants[name].weight / total) for name in names}
        if places[following.tenant] + 1 > shares[following.tenant]:
            return None
        least = self._tenants[following.tenant].counter
        above = {
            name: number - shares[name]
            for name, number in places.items()
            if number - 1 >= shares[name] and self._tenants[name].counter >= least
        }
        if not above:
            return None
        tenant = max(above, key=lambda name: above[name])
        return max((one for one in running if one.tenant == tenant), key=lambda one: one.arrival)

    def sacrifice(self, candidates: Items[Sequence], running: Iterable[Sequence]) -> Sequence:
        """The latest request of the tenant that has the most places for its weight."""
        places = Counter(sequence.tenant for sequence in running)
        return max(
            candidates,
            key=lambda one: (places[one.tenant] / self._tenants[one.tenant].weight, one.tenant, one.arrival),
        )


def _first(adapters: dict[str | None, list[Sequence]]) -> int:
    return min(_oldest(queue) for queue in adapters.values())


def _oldest(queue: list[Sequence]) -> int:
    return queue[-1].arrival
