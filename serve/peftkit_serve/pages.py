"""Paged KV memory: which page is free, how many block tables hold each, and what a new table shares.

A page is `PAGE_TOKENS` positions of every layer's keys and values. Here are page numbers only: the tensors belong
to the runner. A `Prefix` is a run of read-only positions that stands at the head of many block tables:

    prefix of 36 positions     | page 7 (16) | page 9 (16) | page 4 (4) |
    a table forked from it     | page 7      | page 9      | page 12    | page 13 …
                                 shared        shared        a copy of page 4: the request writes on behind it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prefix:
    """Positions computed once and shared, read-only, by every block table that begins with them."""

    pages: tuple[int, ...] = ()
    num_tokens: int = 0


NO_PREFIX = Prefix()


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // PAGE_TOKENS)


def pages_behind(prefix_tokens: int, num_tokens: int) -> int:
    """Pages of its own that a table of `num_tokens` positions needs, the first `prefix_tokens` of them a prefix.

    Full pages of the prefix are shared; its last, partial page is copied, so it counts.
    """
    return pages_for(num_tokens) - prefix_tokens // PAGE_TOKENS


class PageAllocator:
    """Reference counts over `num_pages` pages. Taking and releasing a page is O(1)."""

    def __init__(self, num_pages: int) -> None:
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm, so it is taken first

    @property
    def num_pages(self) -> int:
        """All pages, free and held."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one reference. The caller has seen that they are free."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def fork(self, prefix: Prefix, num_tokens: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Begins a block table of `num_tokens` positions with `prefix`; takes `pages_behind` pages.

        Returns the table and the page copies, (source, destination), that must be made before the table is used:
        one where the prefix ends inside a page, else none.
        """
        num_shared = prefix.num_tokens // PAGE_TOKENS
        shared, partial = prefix.pages[:num_shared], prefix.pages[num_shared:]
        own = self.take(pages_behind(prefix.num_tokens, num_tokens))
        for page in shared:
            assert self._references[page] > 0, f"page {page} of a prefix is free"
            self._references[page] += 1
        return [*shared, *own], tuple(zip(partial, own, strict=False))

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference of each page; a page without any is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Asserts that each page has the references that `holders` says (absent: 0), and the free list is whole."""
        for page, count in enumerate(self._references):
            held = holders.get(page, 0)
            assert count == held, f"page {page} has {count} references, {held} are held"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert free == {page for page, count in enumerate(self._references) if count == 0}, "the free list lost a page"
