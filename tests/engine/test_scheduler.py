"""The scheduler against pure Python fakes: what it plans, in which order, and what it holds."""

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from peftkit.errors import InputError
from peftkit_serve.plan import UNKNOWN

MakeBench = Callable[..., Any]


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last(make_bench: MakeBench) -> None:
    bench = make_bench(budget=8, max_requests=4)
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


def test_running_requests_advance_each_step_beside_a_long_prompt(make_bench: MakeBench) -> None:
    bench = make_bench(budget=8, max_requests=4)
    bench.add("early", prompt=2, max_tokens=20)
    bench.step()
    bench.add("long", prompt=30, max_tokens=1)
    bench.add("late", prompt=1, max_tokens=20)
    for _ in range(5):
        assert "early" in {chunk.request_id for chunk in bench.step().chunks}


def test_a_running_request_behind_a_recomputed_one_keeps_its_token(make_bench: MakeBench) -> None:
    bench = make_bench(budget=8, max_requests=4, slots=1)
    bench.add("b", prompt=1, max_tokens=3, uid="B")
    bench.step()
    bench.add("a", prompt=40, max_tokens=2, uid="A")  # waits for the only slot, passed by the next
    bench.add("c", prompt=1, max_tokens=30)
    while "a" not in bench.admitted:
        bench.step()
    assert [chunk.request_id for chunk in bench.step().chunks] == ["a", "c"]


def test_positions_start_behind_the_virtual_tokens_and_the_partial_page_is_copied_once(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.add("a", prompt=4, max_tokens=3, uid="p20")
    bench.add("b", prompt=4, max_tokens=3, uid="p20")
    plan = bench.step()
    prefix = bench.adapters.prefixes["p20"].pages
    assert [(chunk.start, chunk.num_virtual, chunk.slot) for chunk in plan.chunks] == [(20, 20, -1)] * 2
    assert [chunk.block_table[0] for chunk in plan.chunks] == [prefix[0]] * 2
    assert plan.copies == tuple((prefix[1], chunk.block_table[1]) for chunk in plan.chunks)
    assert bench.step().copies == ()
    bench.run()


def test_requests_are_admitted_in_order_of_arrival(make_bench: MakeBench) -> None:
    bench = make_bench(max_requests=3)
    for index in range(12):
        bench.add(str(index), prompt=5 + index, max_tokens=2 + index % 3)
    bench.run()
    assert bench.admitted == [str(index) for index in range(12)]


def test_a_prompt_that_waits_for_pages_is_not_passed_by_shorter_ones(make_bench: MakeBench) -> None:
    bench = make_bench(num_pages=8, budget=64)
    bench.add("running", prompt=60, max_tokens=10)
    bench.step()
    bench.add("long", prompt=100, max_tokens=2)
    bench.add("short", prompt=2, max_tokens=2)
    bench.run()
    assert bench.admitted == ["running", "long", "short"]


def test_a_request_whose_adapter_has_no_slot_is_passed_a_bounded_number_of_times(make_bench: MakeBench) -> None:
    bench = make_bench(slots=1, bypass=3, max_requests=3)
    bench.add("a", max_tokens=4, uid="A")
    bench.add("b", max_tokens=4, uid="B")
    for index in range(20):
        bench.add(f"a{index}", max_tokens=5 + index % 2, uid="A")  # one of them always runs, and holds the slot
    bench.run()
    assert bench.admitted.index("b") == 1 + 3


def test_an_adapter_that_waits_is_not_starved_by_a_resident_one_whose_requests_are_few_and_long(
    make_bench: MakeBench, seed: int
) -> None:
    rng, longest, patience = random.Random(seed), 40, 60
    bench = make_bench(slots=2, bypass=1000, max_requests=6, wait_steps=patience, num_pages=200)
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


def test_every_adapter_of_many_is_served_with_two_slots(make_bench: MakeBench) -> None:
    bench = make_bench(slots=2)
    for index in range(64):
        bench.add(str(index), uid=f"L{index % 32}")
    bench.run()
    assert len(bench.done) == 64


def test_when_pages_run_out_the_latest_arrival_is_recomputed_with_its_tokens_kept(make_bench: MakeBench) -> None:
    bench = make_bench(num_pages=4, budget=64)
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


def test_a_preempted_request_keeps_its_reference_and_gives_back_its_slot(make_bench: MakeBench) -> None:
    bench = make_bench(num_pages=4, budget=64)
    bench.add("old", prompt=15, max_tokens=30)
    bench.add("new", prompt=15, max_tokens=20, uid="A")
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.adapters.references["A"] == 1 and bench.adapters.pins["A"] == 0
    bench.run()


def test_prefixes_without_requests_make_room(make_bench: MakeBench) -> None:
    bench = make_bench(num_pages=6, budget=64)
    bench.add("p", prompt=4, max_tokens=2, uid="p40")
    bench.run()
    bench.add("q", prompt=4, max_tokens=2, uid="p40")
    bench.run()
    bench.add("base", prompt=90, max_tokens=5)
    bench.step()
    assert not bench.adapters.prefixes
    bench.run()


def test_a_request_that_could_never_fit_is_refused_and_holds_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(num_pages=4)
    assert bench.scheduler.max_text_tokens(0) == 64 and bench.scheduler.max_text_tokens(20) == 28
    for prompt, tokens, uid in ((60, 5, None), (20, 9, "p20"), (33, 16, "p16")):
        with pytest.raises(InputError, match="KV memory") as caught:
            bench.add("x", prompt, tokens, uid)
        assert caught.value.field == "prompt"
    bench.check_idle()
    for prompt, tokens, uid in ((60, 4, None), (20, 8, "p20"), (32, 16, "p16")):
        bench.add("x", prompt, tokens, uid)
        bench.run()


def test_a_budget_below_the_number_of_requests_is_refused(make_bench: MakeBench) -> None:
    with pytest.raises(InputError, match="max_tokens_per_step") as caught:
        make_bench(budget=4, max_requests=8)
    assert caught.value.field == "max_tokens_per_step"


def test_a_request_whose_adapter_fails_is_handed_back_and_others_go_on(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.adapters.broken = {"A"}
    bench.add("a", uid="A")
    bench.add("b")
    assert [chunk.request_id for chunk in bench.step().chunks] == ["b"]
    assert bench.done == ["a"]
    bench.run()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_finishing_at_any_moment_gives_back_everything(make_bench: MakeBench, num_steps: int) -> None:
    bench = make_bench(budget=8)
    for index, uid in enumerate((None, "A", "B", "C", "p20", "p20")):
        bench.add(str(index), prompt=10, max_tokens=50, uid=uid)
    for _ in range(num_steps):
        bench.step()
    for index in range(6):
        bench.scheduler.finish(str(index))
        bench.check()
    bench.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_random_traffic_never_starves_and_always_returns_what_it_held(
    make_bench: MakeBench, seed: int, ahead: bool
) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        budget, slots, bypass = rng.choice([8, 24, 64]), rng.randint(1, 3), rng.randint(1, 5)
        bench = make_bench(num_pages=rng.randint(8, 24), budget=budget, slots=slots, bypass=bypass, ahead=ahead)

        def add(name: str, bench: Any = bench) -> None:
            uids = [None, None, "A", "B", "C", "D", "p5", "p16", "p20"]
            bench.add(name, rng.randint(1, 50), rng.randint(1, 40), rng.choice(uids))

        bench.traffic(rng, add)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_planned_ahead_of_the_last_ones_tokens_computes_the_same(
    make_bench: MakeBench, seed: int, ahead: bool
) -> None:
    rng, bench = random.Random(seed), make_bench(num_pages=9, budget=24, ahead=ahead)
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


def test_what_ends_while_it_is_computed_leaves_its_id_to_another(make_bench: MakeBench) -> None:
    bench = make_bench(ahead=True)
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
def test_passing_is_bounded_in_random_traffic(make_bench: MakeBench, seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    bench = make_bench(num_pages=200, slots=2, bypass=5, ahead=ahead)
    for number in range(150):
        bench.add(f"{number}", rng.randint(1, 20), rng.randint(1, 12), rng.choice([None, "A", "A", "A", "B", "C"]))
        bench.step()
    bench.run()
    order = [int(name) for name in bench.admitted]
    for place, number in enumerate(order):
        assert sum(later > number for later in order[:place]) <= 5, f"{number} was passed too often"


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, peftkit_serve.scheduler, peftkit_serve.pages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
