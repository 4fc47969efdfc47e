"""Paged KV memory: which page is free, how many block tables hold each, and what a new table shares.

A page is `PAGE_TOKENS` positions of every layer's keys and values. Here are page numbers only: the tensors belong
to the runner. A `Prefix` is a run of read-only positions that stands at the head of many block tables:

    prefix of 36 positions     | page 7 (16) | page 9 (16) | page 4 (4) |
    a table forked from it     | page 7      | page 9      | page 12    | page 13 …
                                 shared        shared        a copy of page 4: the request writes on behind it

A full page can be named by what it holds, which is all that was computed before it too: adapter, tenant and tokens.
Whoever needs the same later shares it. When nobody holds a named page it counts as free, but keeps its name until its
room is taken: first those without a name, then the least recently held.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

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


def text_room(num_pages: int, num_virtual: int) -> int:
    """Most text tokens, prompt and generated, that `num_pages` hold for one request with so many virtual tokens."""
    partial = 1 if num_virtual % PAGE_TOKENS else 0  # the prefix's own last page, beside the request's copy of it
    return (num_pages - partial) * PAGE_TOKENS - num_virtual


def root_key(uid: str | None, tenant: str) -> bytes:
    """What the keys of an adapter's pages for a tenant begin with."""
    return blake2b(json.dumps([uid, tenant]).encode(), digest_size=16).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a page that holds these tokens behind the page of `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PageAllocator:
    """Reference counts over `num_pages` pages. Taking and releasing a page is O(1)."""

    def __init__(self, num_pages: int) -> None:
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm, so it is taken first
        self._idle: dict[int, None] = {}  # named ones that nobody holds, the least recently held first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_pages(self) -> int:
        """All pages, free and held."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one reference. The caller has seen that they are free."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        while len(self._free) < count:
            page = next(iter(self._idle))
            del self._idle[page], self._page_of[self._key_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def fork(
        self, prefix: Prefix, num_tokens: int, found: Sequence[int] = ()
    ) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Begins a block table of `num_tokens` positions with `prefix`, then the pages that `share` found behind it.

        Takes `pages_behind` pages, less those found. Returns the table and the page copies, (source, destination), that
        must be made before the table is used: one where the prefix ends inside a page that was not found, else none.
        """
        num_shared = prefix.num_tokens // PAGE_TOKENS
        shared, partial = prefix.pages[:num_shared], prefix.pages[num_shared:]
        own = self.take(pages_behind(prefix.num_tokens, num_tokens) - len(found))
        for page in shared:
            assert self._references[page] > 0, f"page {page} of a prefix is free"
            self._references[page] += 1
        return [*shared, *found, *own], () if found else tuple(zip(partial, own, strict=False))

    def name(self, page: int, key: bytes) -> None:
        """From now on a held page is found by what it holds, unless another one is already or it has a name."""
        assert self._references[page] > 0
        if key not in self._page_of and page not in self._key_of:
            self._key_of[page], self._page_of[key] = key, page

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Takes a reference of each page that these name, up to the first that isn't there; returns the pages."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._references[page] += 1
            self._idle.pop(page, None)
            found.append(page)
        return found

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference of each page; a page without any is free again. The last ones go first of all."""
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0 and page in self._key_of:
                self._idle[page] = None
            elif self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Asserts that each page has the references that `holders` says (absent: 0), and the free list is whole."""
        for page, count in enumerate(self._references):
            held = holders.get(page, 0)
            assert count == held, f"page {page} has {count} references, {held} are held"
        free = {*self._free, *self._idle}
        assert len(free) == self.num_free, "a page is twice in the free list"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "names and pages differ"
        assert set(self._idle) <= set(self._key_of) and not set(self._free) & set(self._key_of)
        assert free == {page for page, count in enumerate(self._references) if count == 0}, "the free list lost a page"
