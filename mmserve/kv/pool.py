"""Bookkeeping of K/V pages: whose they are, and which hold a known prefix. Pure; the tensors are in ``store``."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """A fixed number of pages with reference counts, and a cache of those that hold a known prefix.

    A page is handed out blank by ``allocate``, and may then be published under a key of all that its K/V depends on
    (``kv.prefix``). ``share`` hands it to others as well. A published page without references is kept, and is
    blank again when room is needed: least recently used first, and of one request's pages the last first, for without
    the pages before it a page is of no use. A request that computed a page again, whose key was published meanwhile,
    counts as one that used the published page. Pages are shared in whole units of ``unit`` pages.
    """

    def __init__(self, total: int, *, unit: int = 1) -> None:
        self.total, self.unit = total, unit
        #: Pages that were published and are handed out again, with the keys they had: None = they are not wanted.
        self.evicted: list[tuple[int, bytes]] | None = None
        self.lookups = 0  # pages asked for with ``share``, and
        self.hits = 0  # those of them that it found
        self._blank = list(range(total))  # ascending
        self._references: dict[int, int] = {}  # of the pages that are handed out
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._duplicates: dict[int, bytes] = {}  # of pages that were computed when another had their key
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without references; least recently used first

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._blank) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that are handed out; one that is shared counts once."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """Pages that are published, handed out or not."""
        return len(self._page_of)

    def share(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The published pages of the longest beginning of ``keys``, with one more reference each."""
        found = 0
        while found < len(keys) and keys[found] in self._page_of:
            found += 1
        pages = tuple(self._page_of[key] for key in keys[: found - found % self.unit])
        self.lookups += len(keys)
        self.hits += len(pages)
        for page in pages:
            self._idle.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1
        return pages

    def allocate(self, count: int) -> tuple[int, ...]:
        """``count`` unshared pages; ``ValueError`` where there are too few (the scheduler asks first).

        Pages that follow one another where there is such a run: on a CPU those are read where they are, and others
        copied together in each layer of each pass.
        """
        if count > self.free:
            raise ValueError(f"{count} pages wanted, {self.free} free")
        start = self._run(count)
        pages = self._blank[start : start + count]
        del self._blank[start : start + count]
        pages += [self._evict() for _ in range(count - len(pages))]
        self._references.update(dict.fromkeys(pages, 1))
        return tuple(pages)

    def _run(self, count: int) -> int:
        """Where in ``_blank`` the first ``count`` pages begin that follow one another; 0 where there are none."""
        if not count:
            return 0
        blank = self._blank
        last = range(count - 1, len(blank))
        return next((i - count + 1 for i in last if blank[i] - blank[i - count + 1] == count - 1), 0)

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of the first ``keys`` are published, in whole units."""
        found = next((i for i, key in enumerate(keys) if key not in self._page_of), len(keys))
        return found - found % self.unit

    def published(self) -> dict[bytes, int]:
        """Pages that are published, by key; those without references first, the least recently used first of
        all."""
        idle = {self._key_of[page]: page for page in self._idle}
        return idle | self._page_of

    def hold(self, pages: Sequence[int]) -> None:
        """One more reference to each of these pages, which are published; ``release`` gives it back."""
        for page in pages:
            self._idle.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1

    def withdraw(self, keys: Sequence[bytes]) -> int:
        """Stop sharing the pages of these keys; those without references are blank. Returns how many there were."""
        pages = [self._page_of.pop(key) for key in keys if key in self._page_of]
        for page in pages:
            del self._key_of[page]
            if page in self._idle:
                del self._idle[page]
                insort(self._blank, page)
        return len(pages)

    def publish(self, page: int, key: bytes) -> None:
        """Let others share a page, whose K/V is final; nothing changes where another page has that key already.

        ``ValueError`` for a page that is not handed out, or has another key.
        """
        if page not in self._references or self._key_of.get(page, key) != key:
            raise ValueError(f"page {page} cannot be published: it is not handed out, or has another key")
        if key not in self._page_of:
            self._page_of[key], self._key_of[page] = page, key
            self._duplicates.pop(page, None)
        elif self._page_of[key] != page:
            self._duplicates[page] = key

    def release(self, pages: tuple[int, ...]) -> None:
        """Take one reference to each page back; a page that is free already is a bug and raises ``ValueError``."""
        again = [page for page in pages if page not in self._references]
        if again or len(set(pages)) != len(pages):
            raise ValueError(f"pages released twice: {again or pages}")
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._key_of:
                self._idle[page] = None
                continue
            insort(self._blank, page)
            used = self._page_of.get(self._duplicates.pop(page, b""), -1)
            if used in self._idle:
                self._idle.move_to_end(used)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        if self.evicted is not None:
            self.evicted.append((page, key))
        return page


def pages_for(positions: int, page_size: int) -> int:
    """Pages that hold ``positions`` token positions."""
    return -(-positions // page_size)
