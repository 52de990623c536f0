"""Bookkeeping of K/V pages: reference counts and the prefix cache. Without tensors, which are in ``store``."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """A fixed number of pages with reference counts, and a cache of those that hold a known prefix.

    ``allocate`` returns blank pages. A page may later be published under a key of everything that its K/V depend on
    (``kv.prefix``); ``share`` then gives it to other requests too. A published page without references is kept until
    pages are needed: it is evicted in LRU order and, among the pages of one request, the last first, because a page is
    useless without its predecessors. If a request computed a page whose key another request published meanwhile, its
    use counts for the published page. Pages are shared in units of ``unit`` pages.
    """

    def __init__(self, total: int, *, unit: int = 1) -> None:
        self.total, self.unit = total, unit
        #: Published pages that were evicted, with their keys, for copying to another tier; None = not recorded.
        self.evicted: list[tuple[int, bytes]] | None = None
        self.lookups = 0  # pages looked up by ``share``
        self.hits = 0  # those that were found
        self._blank = list(range(total))  # ascending
        self._references: dict[int, int] = {}  # of allocated pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._duplicates: dict[int, bytes] = {}  # pages computed while another page had their key
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, without references; in LRU order

    @property
    def free(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._blank) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Number of allocated pages; a shared page counts once."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """Number of published pages, allocated or not."""
        return len(self._page_of)

    def share(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The published pages of the longest prefix of ``keys``, each with one more reference."""
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
        """``count`` unshared pages; raises ``ValueError`` if there are too few (the scheduler checks before).

        Consecutive pages if possible: on a CPU these are read in place, while others are gathered in each layer of each
        pass.
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
        """The index in ``_blank`` of the first run of ``count`` consecutive pages; 0 if there is none."""
        if not count:
            return 0
        blank = self._blank
        last = range(count - 1, len(blank))
        return next((i - count + 1 for i in last if blank[i] - blank[i - count + 1] == count - 1), 0)

    def known(self, keys: Sequence[bytes]) -> int:
        """Length of the longest published prefix of ``keys``, in whole units."""
        found = next((i for i, key in enumerate(keys) if key not in self._page_of), len(keys))
        return found - found % self.unit

    def published(self) -> dict[bytes, int]:
        """Published pages by key; those without references first, in LRU order."""
        idle = {self._key_of[page]: page for page in self._idle}
        return idle | self._page_of

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each of these published pages, to be returned by ``release``."""
        for page in pages:
            self._idle.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1

    def unpublish(self, keys: Sequence[bytes]) -> int:
        """Unpublish the pages of these keys; those without references become blank. Returns how many there were."""
        pages = [self._page_of.pop(key) for key in keys if key in self._page_of]
        for page in pages:
            del self._key_of[page]
            if page in self._idle:
                del self._idle[page]
                insort(self._blank, page)
        return len(pages)

    def publish(self, page: int, key: bytes) -> None:
        """Publish a page whose K/V are final; no effect if another page has that key already. Raises ``ValueError`` for
        a page that is not allocated, or has another key."""
        if page not in self._references or self._key_of.get(page, key) != key:
            raise ValueError(f"page {page} cannot be published: it is not allocated, or has another key")
        if key not in self._page_of:
            self._page_of[key], self._key_of[page] = page, key
            self._duplicates.pop(page, None)
        elif self._page_of[key] != page:
            self._duplicates[page] = key

    def release(self, pages: tuple[int, ...]) -> None:
        """Return one reference to each page; raises ``ValueError`` for a page without references, which indicates a
        bug."""
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
    """Number of pages for ``positions`` token positions."""
    return -(-positions // page_size)
