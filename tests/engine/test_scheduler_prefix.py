"""The scheduler's cache of what requests begin with, against pure Python fakes."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from peftkit_serve.plan import StepPlan

MakeBench = Callable[..., Any]


def computed_of(bench: Any, *names: str) -> dict[str, int]:
    """Runs everything; the first position that is computed of each."""
    first: dict[str, int] = {}
    while bench.scheduler.has_work():
        for chunk in bench.step().chunks:
            first.setdefault(chunk.request_id, chunk.start)
    bench.check_idle()
    return {name: first[name] for name in names}


def test_what_a_request_begins_with_is_computed_once_for_an_adapter_and_a_tenant(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(cache=True, num_pages=200, slots=4), list(range(40))
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


def test_an_answer_is_found_by_the_request_that_goes_on_from_it(make_bench: MakeBench) -> None:
    bench, prompt = make_bench(cache=True, num_pages=50), list(range(20))
    bench.add("question", prompt, max_tokens=30)
    bench.run()
    bench.add("next", [*prompt, *[7] * 30, 1, 2])
    assert computed_of(bench, "next") == {"next": 48}, "the last token was drawn, not computed"


def test_virtual_tokens_stand_before_what_is_shared(make_bench: MakeBench) -> None:
    bench = make_bench(cache=True, num_pages=50)
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
def test_requests_that_begin_alike_at_once_wait_for_the_first_of_them(make_bench: MakeBench, ahead: bool) -> None:
    bench = make_bench(cache=True, num_pages=50, budget=16, ahead=ahead, max_requests=6)
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


def test_many_that_wait_for_a_long_text_they_begin_with_keep_nobody_else_from_his_turn(make_bench: MakeBench) -> None:
    bench = make_bench(cache=True, num_pages=90, budget=24, max_requests=6, bypass=4)
    for number in range(30):
        bench.add(str(number), [*range(330), number], max_tokens=1)
    bench.add("other", list(range(500, 510)), max_tokens=2)
    for _ in range(14):  # the last one computes the last page that they share, and has room beside
        bench.step()
    assert bench.admitted == ["0", "other"]
    bench.run()
    assert bench.scheduler.num_cached_tokens == 29 * 320 and not bench.scheduler._coming


def test_a_request_that_is_aborted_lets_those_that_waited_for_its_pages_go_on(make_bench: MakeBench) -> None:
    bench = make_bench(cache=True, num_pages=50, budget=16, max_requests=4)
    for name in "ab":
        bench.add(name, list(range(50)))
    bench.step()
    bench.scheduler.finish("a")
    assert computed_of(bench, "b") == {"b": 16}, "what was computed by then is there"


def test_cached_pages_make_room_the_least_recently_held_first_and_the_head_of_a_text_last(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(cache=True, num_pages=8, budget=64)
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
def test_random_traffic_that_begins_alike_ends_and_gives_everything_back(
    make_bench: MakeBench, seed: int, ahead: bool
) -> None:
    rng, cached = random.Random(seed), 0
    for _ in range(6):
        bench = make_bench(num_pages=rng.randint(10, 24), budget=rng.choice([8, 64]), cache=True, ahead=ahead)
        heads = [[rng.randrange(50) for _ in range(rng.randint(10, 40))] for _ in range(3)]

        def add(name: str, bench: Any = bench, heads: list[list[int]] = heads) -> None:
            prompt = [*rng.choice(heads), *(rng.randrange(50) for _ in range(rng.randint(0, 9)))]
            bench.add(name, prompt, rng.randint(1, 40), rng.choice([None, "A", "B", "p20"]), rng.choice("xy"))

        bench.traffic(rng, add)
        cached += bench.scheduler.num_cached_tokens
    assert cached > 0
