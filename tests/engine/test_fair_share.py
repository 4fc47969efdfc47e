"""Fair share in a discrete-event simulation: the real scheduler over pure Python fakes, time counted in steps."""

import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from peftkit_serve.pages import PageAllocator
from peftkit_serve.plan import StepResult
from peftkit_serve.request import SamplingParams
from peftkit_serve.scheduler import ArrivalOrder, Policy, Residence, Scheduler, Sequence
from peftkit_serve.tenants.fair_share import GENERATED_PRICE, PROMPT_PRICE, FairShare


class NoAdapters:
    """Every adapter is always there."""

    def retain(self, uid: str) -> None: ...

    def release(self, uid: str) -> None: ...

    def pin(self, uid: str) -> Residence | None:
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
    now: int = 0
    arrived: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    service: defaultdict[tuple[str, str | None], float] = field(default_factory=lambda: defaultdict(float))
    bare: dict[str, tuple[str, str | None]] = field(default_factory=dict)

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

    def add(self, tenant: str, prompt: int = 8, tokens: int = 20, uid: str | None = None, **fields: float) -> str:
        name = f"{tenant}-{len(self.arrived)}"
        params = SamplingParams(max_tokens=tokens)
        self.scheduler.add(
            Sequence(name, [1] * prompt, prompt, params, 0, uid=uid, tenant=tenant, **fields)  # type: ignore[arg-type]
        )
        self.arrived[name], self.bare[name] = self.now, (tenant, uid)
        return name

    def step(self) -> int:
        """Returns how many requests took part."""
        plan = self.scheduler.schedule()
        held = self.scheduler.check_integrity()
        self.pages.check_integrity(held)
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

    def keep_busy(self, steps: int, **depth: dict[str, float]) -> None:
        """Keeps requests of these tenants waiting for so many steps."""
        for _ in range(steps):
            waiting = [one.tenant for one in self.scheduler.waiting]
            for tenant, fields in depth.items():
                for _ in range(4 - waiting.count(tenant)):
                    self.add(tenant, prompt=int(random.uniform(1, 40)), tokens=int(random.uniform(1, 60)), **fields)
            self.step()

    def latencies(self, tenant: str) -> list[int]:
        return [self.first[name] - self.arrived[name] for name in self.first if self.bare[name][0] == tenant]

    def of(self, tenant: str) -> float:
        return sum(value for (name, _), value in self.service.items() if name == tenant)


def test_tenants_that_are_always_busy_get_the_same_service_within_vtcs_bound(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.keep_busy(900, a={}, b={}, c={})
    # Sheng et al., theorem 4.8: 2 max(input · price, output price · tokens of all running requests)
    bound = 2 * max(PROMPT_PRICE * 40, GENERATED_PRICE * one.max_requests * 60)
    services = [one.of(tenant) for tenant in "abc"]
    assert max(services) - min(services) <= bound and min(services) > 3 * bound / 2


def test_weights_set_the_ratio_of_services(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.keep_busy(1500, a={"weight": 3.0}, b={"weight": 1.0})
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
    # a second request of the calm tenant waits until the flood has had what the first one's prompt cost: 30 / 12 steps
    assert beside[len(beside) // 2] <= alone[len(alone) // 2] + 1
    assert beside[len(beside) * 9 // 10] <= alone[len(alone) * 9 // 10] + 6
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
    one.keep_busy(400, a={})
    before = one.of("a")
    one.keep_busy(400, a={}, b={})
    assert one.of("a") - before > 0.35 * (one.of("a") - before + one.of("b")), "the newcomer took all turns"


def test_a_weight_so_small_that_its_counter_has_no_end_spoils_no_others(seed: int) -> None:
    random.seed(seed)
    one = Simulation(FairShare())
    one.add("least", weight=1e-320)
    one.run()  # the engine is idle: the next one's counter begins where that one's was
    one.keep_busy(1500, heavy={"weight": 4.0}, light={"weight": 1.0})
    assert one.of("heavy") > 2 * one.of("light")
    one.add("least", weight=1e-320)
    one.keep_busy(50, heavy={"weight": 4.0}, light={"weight": 1.0}, newcomer={})
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
                fields = {"weight": rng.choice([0.5, 1.0, 4.0]), "priority": rng.randint(-1, 1)}
                one.add(
                    rng.choice("abcd"), rng.randint(1, 60), rng.randint(1, 50), rng.choice([None, "x", "y"]), **fields
                )
            one.step()
            live = [s.request_id for s in (*one.scheduler.running, *one.scheduler.waiting)]
            if live and rng.random() < 0.1:
                one.scheduler.finish(rng.choice(live))
        one.run()
        assert not one.policy._accounts  # type: ignore[attr-defined]


def test_the_policy_needs_no_torch_and_no_database() -> None:
    code = (
        "import sys, peftkit_serve.tenants.fair_share; sys.exit('torch' in sys.modules or 'sqlalchemy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
