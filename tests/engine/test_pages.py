"""The page allocator: counts, sharing, the copy of a partial page."""

import random
from collections import Counter

import pytest

from peftkit_serve.pages import (
    PAGE_TOKENS,
    PageAllocator,
    Prefix,
    page_key,
    pages_behind,
    pages_for,
    root_key,
)


def test_pages_taken_are_distinct_and_come_back() -> None:
    pages = PageAllocator(8)
    taken = [*pages.take(3), *pages.take(5)]
    assert sorted(taken) == list(range(8)) and pages.num_free == 0
    pages.release(taken)
    pages.check_integrity({})
    assert pages.num_free == pages.num_pages == 8


def test_a_prefix_shares_its_full_pages_and_has_its_partial_one_copied() -> None:
    pages = PageAllocator(10)
    prefix = Prefix(tuple(pages.take(3)), num_tokens=2 * PAGE_TOKENS + 4)
    first, copies = pages.fork(prefix, 3 * PAGE_TOKENS + 1)
    second, _ = pages.fork(prefix, 2 * PAGE_TOKENS + 5)
    assert first[:2] == second[:2] == list(prefix.pages[:2])
    assert copies == ((prefix.pages[2], first[2]),)
    assert len(first) == 4 and len(second) == 3 and not set(first[2:]) & set(second[2:])
    pages.check_integrity(Counter([*prefix.pages, *first, *second]))
    for table in (first, second, prefix.pages):
        pages.release(table)
    pages.check_integrity({})


def test_a_prefix_that_ends_with_its_page_is_shared_whole() -> None:
    pages = PageAllocator(4)
    prefix = Prefix(tuple(pages.take(1)), num_tokens=PAGE_TOKENS)
    table, copies = pages.fork(prefix, PAGE_TOKENS + 1)
    assert copies == () and table[0] == prefix.pages[0] and len(table) == 2


def test_without_a_prefix_all_pages_are_own() -> None:
    table, copies = PageAllocator(4).fork(Prefix(), 2 * PAGE_TOKENS)
    assert len(table) == 2 and copies == ()


@pytest.mark.parametrize("prefix_tokens", [0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1])
@pytest.mark.parametrize("text_tokens", [1, PAGE_TOKENS - 1, PAGE_TOKENS, 3 * PAGE_TOKENS])
def test_a_fork_takes_the_pages_it_says(prefix_tokens: int, text_tokens: int) -> None:
    pages = PageAllocator(16)
    prefix = Prefix(tuple(pages.take(pages_for(prefix_tokens))), prefix_tokens)
    free, total = pages.num_free, prefix_tokens + text_tokens
    table, _ = pages.fork(prefix, total)
    assert free - pages.num_free == pages_behind(prefix_tokens, total)
    assert len(table) == pages_for(total)


def test_a_named_page_is_shared_while_it_is_held_and_afterwards_until_its_room_is_taken() -> None:
    pages = PageAllocator(3)
    key, other = page_key(root_key("u", "t"), range(16)), page_key(root_key("u", "s"), range(16))
    assert key != other != page_key(root_key(None, "t"), range(16)) and pages.share([key]) == []
    (page,) = pages.take(1)
    pages.name(page, key)
    assert pages.share([key, other]) == [page], "up to the first that isn't there"
    pages.check_integrity({page: 2})
    pages.release([page])
    pages.release([page])
    assert pages.num_free == 3 and pages.share([key]) == [page]
    pages.release([page])
    rest = pages.take(2)
    assert page not in rest, "what has no name is taken first"
    assert pages.take(1) == [page] and pages.share([key]) == []
    pages.check_integrity({one: 1 for one in range(3)})


def test_two_pages_of_the_same_content_have_one_name() -> None:
    pages = PageAllocator(2)
    first, second = pages.take(2)
    key = page_key(root_key("u", "t"), [1, 2])
    pages.name(first, key)
    pages.name(second, key)
    pages.release([first, second])
    assert pages.share([key]) == [first] and pages.num_free == 1
    pages.check_integrity({first: 1})


def test_releasing_twice_taking_too_many_and_lost_counts_are_seen() -> None:
    pages = PageAllocator(2)
    table = pages.take(2)
    with pytest.raises(AssertionError):
        pages.take(1)
    with pytest.raises(AssertionError, match="held"):
        pages.check_integrity({})
    pages.release(table)
    with pytest.raises(AssertionError, match="twice"):
        pages.release(table)


def test_any_mixture_of_forks_and_releases_keeps_the_counts(seed: int) -> None:
    rng = random.Random(seed)
    pages = PageAllocator(40)
    prefixes = [Prefix(tuple(pages.take(pages_for(size))), size) for size in (5, 16, 37)]
    tables: list[list[int]] = []
    for _ in range(500):
        prefix = rng.choice([Prefix(), *prefixes])
        total = prefix.num_tokens + rng.randint(1, 60)
        if pages_behind(prefix.num_tokens, total) <= pages.num_free and rng.random() < 0.6:
            tables.append(pages.fork(prefix, total)[0])
        elif tables:
            pages.release(tables.pop(rng.randrange(len(tables))))
        own = Counter(page for prefix in prefixes for page in prefix.pages)
        pages.check_integrity(own + Counter(page for table in tables for page in table))
