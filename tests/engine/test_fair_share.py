"""Fair share in a discrete-event simulation: the real scheduler over pure Python fakes, time counted in steps."""

import math
import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from peftkit.errors import AdapterError
from peftkit_serve.pages import PageAllocator
from peftkit_serve.plan import StepResult
from peftkit_serve.request import SamplingParams
from peftkit_serve.scheduler import ArrivalOrder, Policy, Residence, Scheduler, Sequence
from peftkit_serve.tenants.fair_share import GENERATED_PRICE, MAX_IDLE, PROMPT_PRICE, FairShare

Owner = tuple[str, str | None]
"""A tenant and its adapter."""
TENANTS: tuple[Owner, ...] = (("a", None), ("b", None), ("c", None))
ADAPTERS: tuple[Owner, ...] = (("a", "x"), ("a", "y"), ("a", None))
LEVELS = pytest.mark.parametrize("owners", [TENANTS, ADAPTERS], ids=["tenants", "adapters"])


class NoAdapters:
    """Every adapter is always there, but for one that can't be used."""

    def retain(self, uid: str) -> None: ...

    def release(self, uid: str) -> None: ...

    def pin(self, uid: str) -> Residence | None:
        if uid == "broken":
            raise AdapterError("it is broken")
        return Residence(slot=0)

    def unpin(self, uid: str) -> None: ...

    def num_pages_to_pin(self, uid: str) -> int:
        return 0

    def reclaim(self, num_pages: int, keep: str | None) -> bool:
        return False


@dataclass
class Simulation:
    """Requests come at given steps; each step the model draws a token wherever it should."""

    policy: Policy
    max_requests: int = 8
    num_pages: int = 400
    budget: int = 256
    longest: tuple[int, int] = (40, 60)
    """Prompt and answer of `flood` and `trickle`."""
    now: int = 0
    arrived: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    service: defaultdict[Owner, float] = field(default_factory=lambda: defaultdict(float))
    bare: dict[str, Owner] = field(default_factory=dict)
    history: list[tuple[dict[Owner, float], set[Owner]]] = field(default_factory=list)
    """Of each step: services before it, and who had a request that it left waiting."""

    def __post_init__(self) -> None:
        self.pages = PageAllocator(self.num_pages)
        self.scheduler = Scheduler(
            self.pages,
            NoAdapters(),
            max_tokens_per_step=self.budget,
            max_requests=self.max_requests,
            prefix_cache=False,
            policy=self.policy,
        )

    def add(
        self,
        tenant: str,
        prompt: int = 8,
        tokens: int = 20,
        uid: str | None = None,
        weight: float = 1.0,
        priority: int = 0,
    ) -> str:
        name = f"{tenant}-{len(self.arrived)}"
        one = Sequence(name, [1] * prompt, prompt, SamplingParams(max_tokens=tokens), 0, uid, tenant=tenant)
        one.weight, one.priority = weight, priority
        self.scheduler.add(one)
        self.arrived[name], self.bare[name] = self.now, (tenant, uid)
        return name

    def step(self) -> int:
        """Returns how many requests took part."""
        plan = self.scheduler.schedule()
        for sequence, _ in self.scheduler.take_rejected():
            self.scheduler.finish(sequence.request_id)
        held = self.scheduler.check_integrity()
        self.pages.check_integrity(held)
        self.history.append((dict(self.service), {(one.tenant, one.uid) for one in self.scheduler.waiting}))
        result = StepResult({chunk.request_id: 1 for chunk in plan.chunks if chunk.sample})
        self.now += 1
        for chunk in plan.chunks:
            sequence = self.scheduler.of(chunk)
            if sequence is None or not self.scheduler.update(sequence, chunk, result):
                continue
            name = sequence.request_id
            if name not in self.first:
                self.first[name] = self.now
                self.service[self.bare[name]] += PROMPT_PRICE * sequence.num_prompt
            self.service[self.bare[name]] += GENERATED_PRICE
            if sequence.num_generated == sequence.params.max_tokens:
                self.scheduler.finish(name)
                self.ended[name] = self.now
        return len(plan.chunks)

    def run(self, max_steps: int = 50_000) -> None:
        while self.scheduler.has_work():
            self.step()
            assert self.now < max_steps, "starved"

    def keep_busy(self, steps: int, **weights: float) -> None:
        """Keeps requests of these tenants waiting for so many steps."""
        for _ in range(steps):
            waiting = [one.tenant for one in self.scheduler.waiting]
            for tenant, weight in weights.items():
                for _ in range(4 - waiting.count(tenant)):
                    self.add(tenant, int(random.uniform(1, 40)), int(random.uniform(1, 60)), weight=weight)
            self.step()

    def live(self, owner: Owner) -> list[Sequence]:
        queued = (*self.scheduler.running, *self.scheduler.waiting)
        return [one for one in queued if (one.tenant, one.uid) == owner]

    def flood(self, owner: Owner, weight: float = 1.0) -> None:
        """More requests of this owner than a step admits."""
        waiting = sum((one.tenant, one.uid) == owner for one in self.scheduler.waiting)
        for _ in range(self.max_requests + 4 - waiting):
            prompt, tokens = (random.randint(1, length) for length in self.longest)
            self.add(owner[0], prompt, tokens, owner[1], weight=weight)

    def trickle(self, owner: Owner, weight: float = 1.0) -> None:
        """The next request of this owner before its last one ends: one is always there, and seldom one waits."""
        live = self.live(owner)
        if len(live) < 2 and all(one.num_generated + 5 >= one.params.max_tokens for one in live):
            self.add(owner[0], random.randint(1, self.longest[0]), self.longest[1], owner[1], weight=weight)

    def widest(self, first: Owner, second: Owner, weights: dict[Owner, float] | None = None) -> float:
        """The most by which their services, by their weights, differ over any time in which both have some waiting."""
        weights, widest = weights or {}, 0.0
        least, most = math.inf, -math.inf
        for services, waiting in self.history:
            parts = [services.get(one, 0.0) / weights.get(one, 1.0) for one in (first, second)]
            least, most = min(least, parts[0] - parts[1]), max(most, parts[0] - parts[1])
            widest = max(widest, most - least)
            if not {first, second} <= waiting:
                least, most = math.inf, -math.inf
        return widest

    def bound(self) -> float:
        """That of Sheng et al. for two who both wait, 2 max(w_p · L, w_q · M), if nothing is longer than `longest`."""
        return 2 * max(PROMPT_PRICE * self.longest[0], GENERATED_PRICE * self.max_requests * sum(self.longest))

    def latencies(self, tenant: str) -> list[int]:
        return [self.first[name] - self.arrived[name] for name in self.first if self.bare[name][0] == tenant]

    def of(self, tenant: str) -> float:
        return sum(value for (name, _), value in self.service.items() if name == tenant)


def test_tenants_that_are_always_busy_get_the_same_service_within_vtcs_bound(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.keep_busy(900, a=1.0, b=1.0, c=1.0)
    services = [one.of(tenant) for tenant in "abc"]
    assert max(services) - min(services) <= one.bound() and min(services) > one.bound()


@LEVELS
def test_whatever_was_before_who_both_wait_get_the_same_service_within_vtcs_bound(
    owners: tuple[Owner, ...], seed: int
) -> None:
    random.seed(seed)
    weighted = owners is TENANTS
    for _ in range(3):
        one = Simulation(FairShare(), max_requests=random.randint(3, 8), longest=(8, 12))
        weights = {owner: random.choice([1.0, 2.0, 4.0]) if weighted else 1.0 for owner in owners}
        for _ in range(12):
            habits = [random.choice([one.flood, one.flood, one.trickle, None]) for _ in owners]
            for _ in range(random.randint(5, 250)):
                for owner, habit in zip(owners, habits, strict=True):
                    if habit is not None:
                        habit(owner, weights[owner])
                one.step()
        for number, owner in enumerate(owners):
            for other in owners[:number]:
                bound = one.bound() / min(weights[owner], weights[other])
                assert one.widest(owner, other, weights) <= bound, (owner, other)


@LEVELS
def test_who_always_had_a_request_running_saved_nothing_up(owners: tuple[Owner, ...], seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    always, later, _ = owners
    while one.now < 1500:
        one.flood(always)
        one.trickle(later)
        one.step()
    assert one.service[always] - one.service[later] > 4 * one.bound(), "it was never behind: the test shows nothing"
    before = dict(one.service)
    for _ in range(1000):
        one.flood(always)
        one.flood(later)
        one.step()
    gains = [one.service[owner] - before[owner] for owner in (always, later)]
    assert abs(gains[0] - gains[1]) <= one.bound() < min(gains)
    assert one.widest(always, later) <= one.bound()


@LEVELS
def test_one_request_at_a_time_gets_no_more_than_who_always_waits(owners: tuple[Owner, ...], seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare(), max_requests=1, longest=(40, 400))
    always, single, _ = owners
    while one.now < 12_000:
        one.flood(always)
        if not one.live(single):
            one.add(single[0], tokens=400, uid=single[1])
        one.step()
    assert abs(one.service[always] - one.service[single]) <= one.bound() < one.service[single]


def test_counters_are_those_of_vtc_and_none_that_counts_is_forgotten(seed: int) -> None:
    """Against the paper's algorithm, which keeps every counter: who is next, and in what, is drawn."""
    rng, policy = random.Random(seed), FairShare()
    counters: defaultdict[str, float] = defaultdict(float)
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    live: set[str] = set()
    last = ""

    def enter(one: Sequence) -> None:
        names = {other.tenant for other in waiting}
        if one.tenant not in names:
            lowest = min(counters[name] for name in names) if names else counters[last]
            counters[one.tenant] = max(counters[one.tenant], lowest)
        waiting.append(one)
        policy.queued(one)

    for number in range(8000):
        chance = rng.random()
        if chance < 0.35:
            tenant = str(rng.randrange(3000))
            one = Sequence(str(number), [1], 1, SamplingParams(), 0, tenant=tenant)
            policy.joined(one)
            enter(one)
        elif waiting and (chance < 0.7 or len(waiting) > 5):
            one = waiting.pop(rng.randrange(len(waiting)))
            policy.dequeued(one)
            if all(other.tenant != one.tenant for other in waiting):
                last = one.tenant
            running.append(one)
        elif running:
            one = running.pop(rng.randrange(len(running)))
            tokens = rng.randint(0, 9)
            policy.served(one, tokens, tokens)
            counters[one.tenant] += (PROMPT_PRICE + GENERATED_PRICE) * tokens
            if rng.random() < 0.1:
                enter(one)
            else:
                policy.left(one)
        live = {one.tenant for one in (*waiting, *running)}
        assert {name: policy._tenants[name].counter for name in live} == {name: counters[name] for name in live}
    assert len(policy._tenants._idle) < len(counters) - len(live), "none was forgotten: the test shows nothing"


@pytest.mark.parametrize("level", ["tenants", "adapters"])
def test_thousands_that_come_and_go_leave_a_bounded_table(level: str) -> None:
    one = Simulation(FairShare())
    policy = one.policy
    assert isinstance(policy, FairShare)

    def add(name: str, tokens: int = 1) -> str:
        return one.add(name, 1, tokens) if level == "tenants" else one.add("a", 1, tokens, name)

    for name in ("much", "some", "nothing"):
        add(name, {"much": 100, "some": 50}.get(name, 1))
    while len(one.arrived) < 6000:  # one who never had anything always waits: the lowest counter never rises
        for _ in range(20 - len(one.scheduler.waiting)):
            add(str(len(one.arrived)))
        one.step()
        live = {sequence.tenant for sequence in (*one.scheduler.running, *one.scheduler.waiting)}
        tables = [policy._tenants, *policy._adapters.values()]
        assert set(policy._adapters) == live
        assert sum(len(table._live) for table in tables) <= 2 * 28
        assert sum(len(table._idle) for table in tables) <= MAX_IDLE
    some, much, *others = [add(name) for name in ("some", "much", *(f"new-{number}" for number in range(20)))]
    one.run()
    firsts = [one.first[name] for name in others]
    assert one.first[some] >= max(firsts) > min(firsts), "who had had most was forgotten before others"
    assert one.first[much] >= one.first[some]


def test_weights_set_the_ratio_of_services(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.keep_busy(1500, a=3.0, b=1.0)
    assert 2.5 < one.of("a") / one.of("b") < 3.5


def test_a_tenants_adapters_share_its_service(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare(), max_requests=4)
    for _ in range(300):  # forty requests for one adapter to each for the other
        for _ in range(40 if one.now % 40 == 0 else 0):
            one.add("a", uid="many")
        if sum(name.uid == "few" for name in one.scheduler.waiting) < 2:
            one.add("a", uid="few")
        one.step()
    assert 0.6 < one.service["a", "many"] / one.service["a", "few"] < 1.6


@pytest.mark.parametrize("long", [20, 500])
def test_a_flood_of_one_tenant_leaves_anothers_latency_as_it_was(seed: int, long: int) -> None:
    def latencies(flood: bool, policy: Policy) -> list[int]:
        rng = random.Random(seed)
        one = Simulation(policy)
        for step in range(600):
            for _ in range(3 if flood and step < 300 else 0):
                one.add("flood", tokens=long)
            if rng.random() < 0.08 and step < 550:  # the last ones end before the simulation does
                one.add("calm", prompt=rng.randint(4, 30), tokens=rng.randint(5, 20))
            one.step()
        return sorted(one.latencies("calm"))

    alone, beside = latencies(False, FairShare()), latencies(True, FairShare())
    assert len(alone) == len(beside) > 20, "a request of the calm tenant starved"
    # a request of the calm tenant soon after another waits until the flood has had what that cost: up to 70 / 14 steps
    assert beside[len(beside) // 2] <= alone[len(alone) // 2] + 1
    assert beside[len(beside) * 9 // 10] <= alone[len(alone) * 9 // 10] + 12
    assert beside[-1] <= 40, "one request of the flood takes up to 500 steps"
    plain = latencies(True, ArrivalOrder())
    assert not plain or max(plain) > 20 or len(plain) < len(alone), "the flood does nothing: the test shows nothing"


def test_a_flood_that_fills_the_pages_leaves_anothers_latency_as_it_was(seed: int) -> None:
    one = Simulation(FairShare(), num_pages=60)
    rng = random.Random(seed)
    for step in range(500):
        if step % 5 == 0:
            one.add("flood", prompt=100, tokens=100)
        if rng.random() < 0.05:
            one.add("calm", prompt=30, tokens=20)
        one.step()
    assert max(one.latencies("calm")) <= 35, "a hundred steps is what one request of the flood takes"
    one.run()
    assert set(one.ended) == set(one.arrived), "the flood itself is served in the end"


def test_who_waited_saves_nothing_up(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.keep_busy(400, a=1.0)
    before = one.of("a")
    one.keep_busy(400, a=1.0, b=1.0)
    assert one.of("a") - before > 0.35 * (one.of("a") - before + one.of("b")), "the newcomer took all turns"


def test_a_weight_so_small_that_its_counter_has_no_end_spoils_no_others(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.add("least", weight=1e-320)
    one.run()  # nobody waits: the next one's counter begins where that one's is
    one.keep_busy(1500, heavy=4.0, light=1.0)
    assert one.of("heavy") > 2 * one.of("light")
    one.add("least", weight=1e-320)
    one.keep_busy(50, heavy=4.0, light=1.0, newcomer=1.0)
    one.run()


def test_no_place_stays_free_while_someone_waits(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    for _ in range(30):
        one.add("a", tokens=30)
    one.add("b", tokens=2)
    while one.scheduler.waiting:
        num_live = len(one.scheduler.running) + len(one.scheduler.waiting)
        assert one.step() == min(one.max_requests, num_live)
    one.run()


def test_priorities_go_first_within_a_tenant_only() -> None:
    one = Simulation(FairShare(), max_requests=1)
    names = [one.add("a", tokens=1, priority=priority) for priority in (0, 5, 1, 5)]
    other = one.add("b", tokens=1)
    one.run()
    assert sorted(names, key=one.ended.__getitem__) == [names[1], names[3], names[2], names[0]]
    assert one.ended[other] < one.ended[names[3]], "another tenant's priorities passed it"


def test_priorities_go_before_arrival_without_tenants() -> None:
    one = Simulation(ArrivalOrder(), max_requests=1)
    first = one.add("a", tokens=3)
    one.step()
    names = [one.add("a", tokens=1, priority=priority) for priority in (0, -5, 1, 5, 1)]
    one.run()
    assert sorted(one.ended, key=one.ended.__getitem__) == [first, *(names[index] for index in (3, 2, 4, 0, 1))]


def test_without_tenants_the_lowest_priority_waits_again_when_pages_run_out() -> None:
    one = Simulation(ArrivalOrder(), num_pages=4)
    low, high = (one.add("a", prompt=15, tokens=30, priority=priority) for priority in (-1, 1))
    while not one.scheduler.num_preemptions:
        one.step()
    assert [sequence.request_id for sequence in one.scheduler.running] == [high]
    one.run()
    assert one.ended[high] < one.ended[low]


def test_a_newcomer_to_a_full_engine_gets_its_place_in_the_first_step() -> None:
    one = Simulation(FairShare())
    for _ in range(8):
        one.add("a", tokens=100)
    for _ in range(3):
        one.step()
    one.add("b", tokens=5)
    one.step()
    assert one.latencies("b") == [1] and one.scheduler.num_preemptions == 1


def test_no_place_is_taken_from_who_would_be_next_again() -> None:
    one = Simulation(FairShare())
    for _ in range(8):
        one.add("behind", tokens=300)
    for _ in range(3):
        one.step()
    for steps in (2, 30):  # the second waits until the other tenant has had as much
        one.add("ahead", prompt=200, tokens=1)
        for _ in range(steps):
            one.step()
    assert one.latencies("ahead")[0] == 1 and 10 < one.latencies("ahead")[1] < 20
    assert one.scheduler.num_preemptions == 2, "a request was computed again for nobody's sake"


def test_preemption_for_fairness_is_bounded(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    for _ in range(40):
        one.add("a", tokens=200)
    for _ in range(40):
        one.step()
        if one.now % 10 == 0:
            one.add("b", tokens=100)
    one.run()
    assert one.scheduler.num_preemptions <= 8, "two tenants take each other's places in turn"


def test_random_traffic_of_many_tenants_always_ends(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        one = Simulation(FairShare(), max_requests=rng.randint(1, 6), num_pages=rng.randint(12, 40), budget=64)
        for _ in range(120):
            if rng.random() < 0.7:
                one.add(
                    rng.choice("abcd"),
                    rng.randint(1, 60),
                    rng.randint(1, 50),
                    rng.choice([None, "x", "y", "broken"]),
                    rng.choice([0.5, 1.0, 4.0]),
                    rng.randint(-1, 1),
                )
            one.step()
            live = [s.request_id for s in (*one.scheduler.running, *one.scheduler.waiting)]
            if live and rng.random() < 0.1:
                one.scheduler.finish(rng.choice(live))
        one.run()
        assert isinstance(one.policy, FairShare) and not one.policy._adapters
        assert not one.policy._tenants._live and not one.policy._tenants._waiting


def test_the_policy_needs_no_torch_and_no_database() -> None:
    code = (
        "import sys, peftkit_serve.tenants.fair_share; sys.exit('torch' in sys.modules or 'sqlalchemy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
