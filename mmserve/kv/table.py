"""The pages of one request: allocated, published and released together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmserve.kv.pool import PagePool


@dataclass(frozen=True)
class PageTable:
    """A request's pages in order of position; the first ``shared`` hold their K/V already and are never written.

    ``keys``: keys under which the first pages can be published once they have been computed.
    """

    ids: tuple[int, ...] = ()
    shared: int = 0
    keys: tuple[bytes, ...] = ()

    @classmethod
    def take(cls, pool: PagePool, count: int, keys: tuple[bytes, ...]) -> PageTable:
        """``count`` pages: those published under a prefix of ``keys``, and blank ones.

        Raises ``ValueError``, without allocating any, if there are too few.
        """
        shared = pool.share(keys)
        try:
            return cls(shared + pool.allocate(count - len(shared)), len(shared), keys)
        except ValueError:
            pool.release(shared)
            raise

    def trimmed(self, pool: PagePool, count: int) -> PageTable:
        """The first ``count`` pages; the others are released."""
        pool.release(self.ids[count:])
        return replace(self, ids=self.ids[:count])

    def publish(self, pool: PagePool, computed: int | None) -> None:
        """Publish those of the first ``computed`` pages (None = all) that have a key."""
        for page, key in list(zip(self.ids, self.keys, strict=False))[self.shared : computed]:
            pool.publish(page, key)
