"""Whose turn it is: virtual token counters for tenants, and within a tenant for its adapters, in pure Python.

After Sheng et al. 2024, "Fairness in Serving Large Language Models" (VTC), at two levels and with weights. A counter
is the service that its owner has had, a prompt's token at price 1 and a generated one at price 2, by its weight. The
waiting request of the owner with the lowest counter is next. Who comes back after a pause is lifted to the lowest
counter of those who did not pause: nobody saves up turns by waiting. It is work conserving: no place is kept free.

Counters alone can't help who arrives when all places are taken by long answers of another. So a tenant that waits
and has less than its share of the places takes some from those who have more than theirs.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from peftkit_serve.scheduler import Sequence

PROMPT_PRICE = 1.0
GENERATED_PRICE = 2.0


@dataclass(slots=True)
class _Account:
    """One tenant's counters, while it has requests."""

    counter: float = 0.0
    weight: float = 1.0
    num_live: int = 0
    adapters: defaultdict[str | None, float] = field(default_factory=lambda: defaultdict(float))
    live_adapters: Counter[str | None] = field(default_factory=Counter)


class FairShare:
    """The scheduler's `Policy` of a server with tenants."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._last = 0.0  # where the counter of one who comes to an idle engine begins

    def joined(self, sequence: Sequence) -> None:
        """A request has come."""
        account = self._accounts.get(sequence.tenant)
        if account is None:
            counters = (other.counter for other in self._accounts.values())
            lowest = min(filter(math.isfinite, counters), default=self._last)
            account = self._accounts[sequence.tenant] = _Account(counter=lowest)
        account.weight = sequence.weight
        account.num_live += 1
        uid = sequence.uid
        if not account.live_adapters[uid]:
            lowest = min((account.adapters[one] for one in +account.live_adapters), default=0.0)
            account.adapters[uid] = max(account.adapters[uid], lowest)
        account.live_adapters[uid] += 1

    def left(self, sequence: Sequence) -> None:
        """A request has ended, whatever ended it."""
        account = self._accounts[sequence.tenant]
        account.num_live -= 1
        account.live_adapters[sequence.uid] -= 1
        if not account.num_live:
            if math.isfinite(account.counter):  # else nobody would ever be behind anybody again
                self._last = max(self._last, account.counter)
            del self._accounts[sequence.tenant]

    def served(self, sequence: Sequence, num_prompt: int, num_generated: int) -> None:
        """Tokens of a request were computed for the first time."""
        account = self._accounts[sequence.tenant]
        price = (PROMPT_PRICE * num_prompt + GENERATED_PRICE * num_generated) / account.weight
        account.counter += price
        account.adapters[sequence.uid] += price

    def order(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The waiting requests, the next one first; counters may move while it is read."""
        groups: dict[str, dict[str | None, list[Sequence]]] = {}
        for sequence in waiting:
            groups.setdefault(sequence.tenant, {}).setdefault(sequence.uid, []).append(sequence)
        for adapters in groups.values():
            for queue in adapters.values():
                queue.sort(key=lambda one: (one.priority, -one.arrival))  # the next one last
        while groups:
            tenant = min(groups, key=lambda name: (self._accounts[name].counter, _first(groups[name])))
            adapters, account = groups[tenant], self._accounts[tenant]
            uid = min(
                adapters, key=lambda one: (-adapters[one][-1].priority, account.adapters[one], _oldest(adapters[one]))
            )
            yield adapters[uid].pop()
            if not adapters[uid]:
                del adapters[uid]
            if not adapters:
                del groups[tenant]

    def victim(self, running: Iterable[Sequence], waiting: Iterable[Sequence], max_requests: int) -> Sequence | None:
        """A running request that gives its place to the next one that waits; None for none.

        A tenant's share is its weight's part of the places. Its next request gets a place that another tenant has
        above its own share, as long as neither crosses its share by that: then the two can't take turns for ever.
        """
        waiting = list(waiting)
        places = Counter(sequence.tenant for sequence in running)
        following = next(self.order(waiting), None)
        names = {sequence.tenant for sequence in waiting} | set(places)
        if following is None or len(names) < 2:
            return None
        total = sum(self._accounts[name].weight for name in names)
        shares = {name: max(1.0, max_requests * self._accounts[name].weight / total) for name in names}
        if places[following.tenant] + 1 > shares[following.tenant]:
            return None
        above = {name: number - shares[name] for name, number in places.items() if number - 1 >= shares[name]}
        if not above:
            return None
        tenant = max(above, key=lambda name: above[name])
        return max((one for one in running if one.tenant == tenant), key=lambda one: one.arrival)

    def sacrifice(self, candidates: Items[Sequence], running: Iterable[Sequence]) -> Sequence:
        """The latest request of the tenant that has the most places for its weight."""
        places = Counter(sequence.tenant for sequence in running)
        return max(
            candidates,
            key=lambda one: (places[one.tenant] / self._accounts[one.tenant].weight, one.tenant, one.arrival),
        )


def _first(adapters: dict[str | None, list[Sequence]]) -> int:
    return min(_oldest(queue) for queue in adapters.values())


def _oldest(queue: list[Sequence]) -> int:
    return queue[-1].arrival
