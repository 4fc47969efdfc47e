"""The scheduler against pure Python fakes: what it plans, in which order, and what it holds."""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

import pytest

from peftkit.errors import AdapterError, InputError
from peftkit_serve.pages import PAGE_TOKENS, PageAllocator, Prefix, pages_for
from peftkit_serve.plan import UNKNOWN, StepPlan, StepResult
from peftkit_serve.request import SamplingParams
from peftkit_serve.scheduler import Residence, Scheduler, Sequence


@dataclass
class FakeAdapters:
    """LoRA slots and prefixes without tensors. A uid "p20" is a prompt of 20 virtual tokens, any other a LoRA."""

    pages: PageAllocator
    num_slots: int = 2
    references: Counter[str] = field(default_factory=Counter)
    pins: Counter[str] = field(default_factory=Counter)
    slots: dict[str, int] = field(default_factory=dict)
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def retain(self, uid: str) -> None:
        self.references[uid] += 1

    def release(self, uid: str) -> None:
        assert self.references[uid] > self.pins[uid]
        self.references[uid] -= 1

    def num_pages_to_pin(self, uid: str) -> int:
        return pages_for(int(uid[1:])) if uid[0] == "p" and uid not in self.prefixes else 0

    def pin(self, uid: str) -> Residence | None:
        if uid in self.broken:
            raise AdapterError(f"{uid} is broken")
        if uid[0] == "p":
            if uid not in self.prefixes:
                size = int(uid[1:])
                self.prefixes[uid] = Prefix(tuple(self.pages.take(pages_for(size))), size)
            self.pins[uid] += 1
            return Residence(prefix=self.prefixes[uid])
        if uid not in self.slots:
            taken = {slot for other, slot in self.slots.items() if self.pins[other]}
            free = sorted(set(range(self.num_slots)) - taken)
            if not free:
                return None
            self.slots = {other: slot for other, slot in self.slots.items() if slot != free[0]} | {uid: free[0]}
        self.pins[uid] += 1
        return Residence(slot=self.slots[uid])

    def unpin(self, uid: str) -> None:
        assert self.pins[uid] > 0
        self.pins[uid] -= 1

    def reclaim(self, num_pages: int, keep: str | None) -> bool:
        chosen = [uid for uid in self.prefixes if not self.pins[uid] and uid != keep]
        if sum(len(self.prefixes[uid].pages) for uid in chosen) < num_pages:
            return False
        for uid in chosen:
            self.pages.release(self.prefixes.pop(uid).pages)
        return True


class Bench:
    """A scheduler, its fakes, and a model whose next token is always 7."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        budget: int = 32,
        max_requests: int = 8,
        slots: int = 2,
        bypass: int = 4,
        wait_steps: int = 1024,
        ahead: bool = False,
        cache: bool = False,
    ):
        self.pages = PageAllocator(num_pages)
        self.adapters = FakeAdapters(self.pages, slots)
        self.scheduler = Scheduler(
            self.pages,
            self.adapters,
            max_tokens_per_step=budget,
            max_requests=max_requests,
            max_bypass=bypass,
            max_wait_steps=wait_steps,
            prefix_cache=cache,
        )
        self.budget = budget
        self.ahead = ahead
        self.under_way: StepPlan | None = None
        self.done: list[str] = []
        self.admitted: list[str] = []

    def add(
        self, name: str, prompt: int | list[int] = 4, max_tokens: int = 3, uid: str | None = None, tenant: str = ""
    ) -> None:
        virtual = int(uid[1:]) if uid and uid[0] == "p" else 0
        params, ids = SamplingParams(max_tokens=max_tokens), prompt if isinstance(prompt, list) else list(range(prompt))
        self.scheduler.add(Sequence(name, ids, len(ids), params, seed=0, uid=uid, num_virtual=virtual, tenant=tenant))

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for sequence, _ in self.scheduler.take_rejected():
            self.scheduler.finish(sequence.request_id)
            self.done.append(sequence.request_id)
        self.admitted += [c.request_id for c in plan.chunks if c.start == c.num_virtual and self._is_new(c.request_id)]
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= self.budget
        assert all(len(c.block_table) * PAGE_TOKENS >= c.start + len(c.token_ids) for c in plan.chunks)
        self.check()
        booked, self.under_way = (self.under_way, plan) if self.ahead else (plan, None)
        if booked is not None:
            self.book(booked)
        return plan

    def book(self, plan: StepPlan) -> None:
        result = StepResult({chunk.request_id: 7 for chunk in plan.chunks if chunk.sample})
        for sequence in self.scheduler.update(plan, result):
            if sequence.num_generated == sequence.params.max_tokens:
                self.scheduler.finish(sequence.request_id)
                self.done.append(sequence.request_id)
        self.check()

    def _is_new(self, name: str) -> bool:
        return name not in self.admitted

    def run(self, max_steps: int = 10_000) -> int:
        steps = 0
        while self.scheduler.has_work():
            self.step()
            steps += 1
            assert steps < max_steps, "starved"
        self.check_idle()
        return steps

    def check(self) -> None:
        held = self.scheduler.check_integrity()
        for prefix in self.adapters.prefixes.values():
            held.update(prefix.pages)
        self.pages.check_integrity(held)
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert +self.adapters.references == Counter(s.uid for s in queued if s.uid)
        assert +self.adapters.pins == Counter(s.uid for s in self.scheduler.running if s.uid)

    def check_idle(self) -> None:
        self.adapters.reclaim(0, None)
        assert not +self.adapters.references and not +self.adapters.pins
        self.pages.check_integrity({})


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    bench = Bench(budget=8, max_requests=4)
    bench.add("a", prompt=20, max_tokens=2)
    chunks = [bench.step().chunks[0] for _ in range(4)]
    assert [(c.start, len(c.token_ids), c.sample is not None) for c in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
        (20, 1, True),
    ]
    assert [c.sample.step for c in chunks if c.sample] == [0, 1]
    assert chunks[3].token_ids == (7,)
    bench.check_idle()


def test_running_requests_advance_each_step_beside_a_long_prompt() -> None:
    bench = Bench(budget=8, max_requests=4)
    bench.add("early", prompt=2, max_tokens=20)
    bench.step()
    bench.add("long", prompt=30, max_tokens=1)
    bench.add("late", prompt=1, max_tokens=20)
    for _ in range(5):
        assert "early" in {chunk.request_id for chunk in bench.step().chunks}


def test_a_running_request_behind_a_recomputed_one_keeps_its_token() -> None:
    bench = Bench(budget=8, max_requests=4, slots=1)
    bench.add("b", prompt=1, max_tokens=3, uid="B")
    bench.step()
    bench.add("a", prompt=40, max_tokens=2, uid="A")  # waits for the only slot, passed by the next
    bench.add("c", prompt=1, max_tokens=30)
    while "a" not in bench.admitted:
        bench.step()
    assert [chunk.request_id for chunk in bench.step().chunks] == ["a", "c"]


def test_positions_start_behind_the_virtual_tokens_and_the_partial_page_is_copied_once() -> None:
    bench = Bench()
    bench.add("a", prompt=4, max_tokens=3, uid="p20")
    bench.add("b", prompt=4, max_tokens=3, uid="p20")
    plan = bench.step()
    prefix = bench.adapters.prefixes["p20"].pages
    assert [(chunk.start, chunk.num_virtual, chunk.slot) for chunk in plan.chunks] == [(20, 20, -1)] * 2
    assert [chunk.block_table[0] for chunk in plan.chunks] == [prefix[0]] * 2
    assert plan.copies == tuple((prefix[1], chunk.block_table[1]) for chunk in plan.chunks)
    assert bench.step().copies == ()
    bench.run()


def test_requests_are_admitted_in_order_of_arrival() -> None:
    bench = Bench(max_requests=3)
    for index in range(12):
        bench.add(str(index), prompt=5 + index, max_tokens=2 + index % 3)
    bench.run()
    assert bench.admitted == [str(index) for index in range(12)]


def test_a_prompt_that_waits_for_pages_is_not_passed_by_shorter_ones() -> None:
    bench = Bench(num_pages=8, budget=64)
    bench.add("running", prompt=60, max_tokens=10)
    bench.step()
    bench.add("long", prompt=100, max_tokens=2)
    bench.add("short", prompt=2, max_tokens=2)
    bench.run()
    assert bench.admitted == ["running", "long", "short"]


def test_a_request_whose_adapter_has_no_slot_is_passed_a_bounded_number_of_times() -> None:
    bench = Bench(slots=1, bypass=3, max_requests=3)
    bench.add("a", max_tokens=4, uid="A")
    bench.add("b", max_tokens=4, uid="B")
    for index in range(20):
        bench.add(f"a{index}", max_tokens=5 + index % 2, uid="A")  # one of them always runs, and holds the slot
    bench.run()
    assert bench.admitted.index("b") == 1 + 3


def test_an_adapter_that_waits_is_not_starved_by_a_resident_one_whose_requests_are_few_and_long(seed: int) -> None:
    rng, longest, patience = random.Random(seed), 40, 60
    bench = Bench(slots=2, bypass=1000, max_requests=6, wait_steps=patience, num_pages=200)
    waited_since: dict[str, int] = {}
    started: dict[str, int] = {}
    for step in range(2000):
        if step % 9 == 0:  # so one of each always runs, and holds the slots: less often than any count of them helps
            bench.add(f"hot{step}", rng.randint(2, 9), rng.randint(30, longest), uid=rng.choice("AB"))
        if step % 150 == 75:
            bench.add(f"cold{step}", 5, 3, uid=rng.choice("CDEF"))
            waited_since[f"cold{step}"] = step
        bench.step()
        started |= {name: step for name in waited_since if name in bench.admitted and name not in started}
    assert len(started) == len(waited_since) > 10
    # until it is overdue, until a slot's last request has ended, and a step for each of the two to be seen
    assert max(started[name] - since for name, since in waited_since.items()) <= patience + longest + 2
    assert max(started[name] - since for name, since in waited_since.items()) > longest, "none had to wait"


def test_every_adapter_of_many_is_served_with_two_slots() -> None:
    bench = Bench(slots=2)
    for index in range(64):
        bench.add(str(index), uid=f"L{index % 32}")
    bench.run()
    assert len(bench.done) == 64


def test_when_pages_run_out_the_latest_arrival_is_recomputed_with_its_tokens_kept() -> None:
    bench = Bench(num_pages=4, budget=64)
    bench.add("old", prompt=15, max_tokens=30)
    bench.add("new", prompt=15, max_tokens=20)
    draws: list[tuple[str, int]] = []
    recomputed = 0
    while bench.scheduler.has_work():
        plan = bench.step()
        draws += [(chunk.request_id, chunk.sample.step) for chunk in plan.chunks if chunk.sample]
        recomputed += sum(c.request_id == "new" and c.start == 0 and len(c.token_ids) > 15 for c in plan.chunks)
    assert bench.scheduler.num_preemptions == recomputed == 1
    assert [step for name, step in draws if name == "new"] == list(range(20)), "each token is drawn once, in order"
    assert bench.done == ["old", "new"]
    bench.check_idle()


def test_a_preempted_request_keeps_its_reference_and_gives_back_its_slot() -> None:
    bench = Bench(num_pages=4, budget=64)
    bench.add("old", prompt=15, max_tokens=30)
    bench.add("new", prompt=15, max_tokens=20, uid="A")
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.adapters.references["A"] == 1 and bench.adapters.pins["A"] == 0
    bench.run()


def test_prefixes_without_requests_make_room() -> None:
    bench = Bench(num_pages=6, budget=64)
    bench.add("p", prompt=4, max_tokens=2, uid="p40")
    bench.run()
    bench.add("q", prompt=4, max_tokens=2, uid="p40")
    bench.run()
    bench.add("base", prompt=90, max_tokens=5)
    bench.step()
    assert not bench.adapters.prefixes
    bench.run()


def test_a_request_that_could_never_fit_is_refused_and_holds_nothing() -> None:
    bench = Bench(num_pages=4)
    assert bench.scheduler.max_text_tokens(0) == 64 and bench.scheduler.max_text_tokens(20) == 28
    for prompt, tokens, uid in ((60, 5, None), (20, 9, "p20"), (33, 16, "p16")):
        with pytest.raises(InputError, match="KV memory") as caught:
            bench.add("x", prompt, tokens, uid)
        assert caught.value.field == "prompt"
    bench.check_idle()
    for prompt, tokens, uid in ((60, 4, None), (20, 8, "p20"), (32, 16, "p16")):
        bench.add("x", prompt, tokens, uid)
        bench.run()


def test_a_budget_below_the_number_of_requests_is_refused() -> None:
    with pytest.raises(InputError, match="max_tokens_per_step") as caught:
        Bench(budget=4, max_requests=8)
    assert caught.value.field == "max_tokens_per_step"


def test_a_request_whose_adapter_fails_is_handed_back_and_others_go_on() -> None:
    bench = Bench()
    bench.adapters.broken = {"A"}
    bench.add("a", uid="A")
    bench.add("b")
    assert [chunk.request_id for chunk in bench.step().chunks] == ["b"]
    assert bench.done == ["a"]
    bench.run()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_finishing_at_any_moment_gives_back_everything(num_steps: int) -> None:
    bench = Bench(budget=8)
    for index, uid in enumerate((None, "A", "B", "C", "p20", "p20")):
        bench.add(str(index), prompt=10, max_tokens=50, uid=uid)
    for _ in range(num_steps):
        bench.step()
    for index in range(6):
        bench.scheduler.finish(str(index))
        bench.check()
    bench.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_random_traffic_never_starves_and_always_returns_what_it_held(seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        budget, slots, bypass = rng.choice([8, 24, 64]), rng.randint(1, 3), rng.randint(1, 5)
        bench = Bench(num_pages=rng.randint(8, 24), budget=budget, slots=slots, bypass=bypass, ahead=ahead)
        uids = [None, None, "A", "B", "C", "D", "p5", "p16", "p20"]
        for number in range(60):
            bench.add(str(number), rng.randint(1, 50), rng.randint(1, 40), rng.choice(uids))
            for _ in range(rng.randint(0, 4)):
                if bench.scheduler.has_work():
                    bench.step()
            live = [s.request_id for s in (*bench.scheduler.running, *bench.scheduler.waiting)]
            if live and rng.random() < 0.15:
                bench.scheduler.finish(rng.choice(live))
                bench.check()
        bench.run()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_planned_ahead_of_the_last_ones_tokens_computes_the_same(seed: int, ahead: bool) -> None:
    rng, bench = random.Random(seed), Bench(num_pages=9, budget=24, ahead=ahead)
    lengths = {str(n): (rng.randint(1, 40), rng.randint(1, 60)) for n in range(40)}
    computed: dict[str, list[int]] = {name: [] for name in lengths}
    draws: dict[str, list[int]] = {name: [] for name in lengths}
    for name, (prompt, tokens) in lengths.items():
        bench.add(name, prompt, tokens, rng.choice([None, "A", "B", "p20"]))
    while bench.scheduler.has_work():
        known = {one.request_id: len(one.token_ids) for one in bench.scheduler.running}
        for chunk in bench.step().chunks:
            name, start = chunk.request_id, chunk.start - chunk.num_virtual
            computed[name][start:] = range(start, start + len(chunk.token_ids))
            draws[name] += [chunk.sample.step] if chunk.sample else []
            unknown = [start + n for n, token in enumerate(chunk.token_ids) if token == UNKNOWN]
            assert unknown == ([known[name]] if ahead and unknown else []), "only the last token may be unknown"
            assert all(token == 7 for n, token in enumerate(chunk.token_ids, start) if n >= lengths[name][0] + 1 - ahead
                       and n not in unknown)  # fmt: skip
    for name, (prompt, tokens) in lengths.items():
        assert draws[name] == list(range(tokens)), "each token is drawn once, in order, and none too many"
        assert computed[name] == list(range(prompt + tokens - 1))
    assert bench.scheduler.num_preemptions > 0
    bench.check_idle()


def test_what_ends_while_it_is_computed_leaves_its_id_to_another() -> None:
    bench = Bench(ahead=True)
    bench.add("x", prompt=4, max_tokens=9)
    bench.step()
    bench.step()
    bench.scheduler.finish("x")
    bench.add("x", prompt=3, max_tokens=2)
    sequence = bench.scheduler.get("x")
    assert sequence is not None
    bench.step()  # books a step of the first one
    assert sequence.token_ids == [0, 1, 2]
    bench.run()
    assert sequence.token_ids == [0, 1, 2, 7, 7]


@pytest.mark.parametrize("ahead", [False, True])
def test_passing_is_bounded_in_random_traffic(seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    bench = Bench(num_pages=200, slots=2, bypass=5, ahead=ahead)
    for number in range(150):
        bench.add(f"{number}", rng.randint(1, 20), rng.randint(1, 12), rng.choice([None, "A", "A", "A", "B", "C"]))
        bench.step()
    bench.run()
    order = [int(name) for name in bench.admitted]
    for place, number in enumerate(order):
        assert sum(later > number for later in order[:place]) <= 5, f"{number} was passed too often"


def computed_of(bench: Bench, *names: str) -> dict[str, int]:
    """Runs everything; the first position that is computed of each."""
    first: dict[str, int] = {}
    while bench.scheduler.has_work():
        for chunk in bench.step().chunks:
            first.setdefault(chunk.request_id, chunk.start)
    bench.check_idle()
    return {name: first[name] for name in names}


def test_what_a_request_begins_with_is_computed_once_for_an_adapter_and_a_tenant() -> None:
    bench, prompt = Bench(cache=True, num_pages=200, slots=4), list(range(40))
    bench.add("first", prompt, uid="A", tenant="x")
    bench.run()
    cases = {"same": (prompt, "A", "x"), "longer": ([*prompt, 5, 6, 7], "A", "x"), "shorter": (prompt[:32], "A", "x"),
             "other text": ([*prompt[:17], 9, *prompt[18:]], "A", "x"), "other adapter": (prompt, "B", "x"),
             "base": (prompt, None, "x"), "other tenant": (prompt, "A", "y")}  # fmt: skip
    first = dict.fromkeys(cases, 0) | {"same": 32, "longer": 32, "shorter": 16, "other text": 16}
    for name, (ids, uid, tenant) in cases.items():
        bench.add(name, ids, uid=uid, tenant=tenant)
        assert computed_of(bench, name) == {name: first[name]}
    assert bench.scheduler.num_cached_tokens == sum(first.values())


def test_an_answer_is_found_by_the_request_that_goes_on_from_it() -> None:
    bench, prompt = Bench(cache=True, num_pages=50), list(range(20))
    bench.add("question", prompt, max_tokens=30)
    bench.run()
    bench.add("next", [*prompt, *[7] * 30, 1, 2])
    assert computed_of(bench, "next") == {"next": 48}, "the last token was drawn, not computed"


def test_virtual_tokens_stand_before_what_is_shared() -> None:
    bench = Bench(cache=True, num_pages=50)
    for number in range(3):  # 20 virtual tokens: of a page that holds 4 of them, and 12 of text
        bench.add(str(number), list(range(30)), uid="p20")
    first: dict[str, int] = {}
    copies = 0
    while bench.scheduler.has_work():
        plan = bench.step()
        copies += len(plan.copies)
        for chunk in plan.chunks:
            first.setdefault(chunk.request_id, chunk.start)
    assert first == {"0": 20, "1": 48, "2": 48} and copies == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_that_begin_alike_at_once_wait_for_the_first_of_them(ahead: bool) -> None:
    bench = Bench(cache=True, num_pages=50, budget=16, ahead=ahead, max_requests=6)
    for number in range(4):
        bench.add(str(number), [*range(50), number], max_tokens=2)
    bench.add("other", list(range(60, 70)), max_tokens=2)
    plans: list[StepPlan] = []
    while bench.scheduler.has_work():
        plans.append(bench.step())
    tokens = Counter(chunk.request_id for plan in plans for chunk in plan.chunks for _ in chunk.token_ids)
    assert tokens == {"0": 52, "1": 52 - 48, "2": 52 - 48, "3": 52 - 48, "other": 11}
    assert bench.admitted[:2] == ["0", "other"], "others pass meanwhile"
    bench.check_idle()


def test_many_that_wait_for_a_long_text_they_begin_with_keep_nobody_else_from_his_turn() -> None:
    bench = Bench(cache=True, num_pages=90, budget=24, max_requests=6, bypass=4)
    for number in range(30):
        bench.add(str(number), [*range(330), number], max_tokens=1)
    bench.add("other", list(range(500, 510)), max_tokens=2)
    for _ in range(14):  # the last one computes the last page that they share, and has room beside
        bench.step()
    assert bench.admitted == ["0", "other"]
    bench.run()
    assert bench.scheduler.num_cached_tokens == 29 * 320 and not bench.scheduler._coming


def test_a_request_that_is_aborted_lets_those_that_waited_for_its_pages_go_on() -> None:
    bench = Bench(cache=True, num_pages=50, budget=16, max_requests=4)
    for name in "ab":
        bench.add(name, list(range(50)))
    bench.step()
    bench.scheduler.finish("a")
    assert computed_of(bench, "b") == {"b": 16}, "what was computed by then is there"


def test_cached_pages_make_room_the_least_recently_held_first_and_the_head_of_a_text_last() -> None:
    bench = Bench(cache=True, num_pages=8, budget=64)
    bench.add("old", [1] * 33, max_tokens=1)
    bench.run()
    bench.add("new", [2] * 65, max_tokens=1)
    bench.run()
    assert bench.pages.num_free == 8, "what nobody holds counts as free"
    bench.add("big", [3] * 50, max_tokens=1)  # four pages: two were never named, then those of old
    bench.run()
    bench.add("new again", [2] * 65, max_tokens=1)
    assert computed_of(bench, "new again") == {"new again": 64}
    bench.add("old again", [1] * 33, max_tokens=1)
    assert computed_of(bench, "old again") == {"old again": 0}


@pytest.mark.parametrize("ahead", [False, True])
def test_random_traffic_that_begins_alike_ends_and_gives_everything_back(seed: int, ahead: bool) -> None:
    rng, cached = random.Random(seed), 0
    for _ in range(6):
        bench = Bench(num_pages=rng.randint(10, 24), budget=rng.choice([8, 64]), cache=True, ahead=ahead)
        heads = [[rng.randrange(50) for _ in range(rng.randint(10, 40))] for _ in range(3)]
        for number in range(60):
            prompt = [*rng.choice(heads), *(rng.randrange(50) for _ in range(rng.randint(0, 9)))]
            bench.add(str(number), prompt, rng.randint(1, 40), rng.choice([None, "A", "B", "p20"]), rng.choice("xy"))
            for _ in range(rng.randint(0, 4)):
                if bench.scheduler.has_work():
                    bench.step()
            live = [s.request_id for s in (*bench.scheduler.running, *bench.scheduler.waiting)]
            if live and rng.random() < 0.15:
                bench.scheduler.finish(rng.choice(live))
                bench.check()
        bench.run()
        cached += bench.scheduler.num_cached_tokens
    assert cached > 0


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, peftkit_serve.scheduler, peftkit_serve.pages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
