"""Bookkeeping of K/V pages: which are free. Pure; the tensors are in ``store``."""

from __future__ import annotations


class PagePool:
    """A fixed number of pages, handed out and taken back whole."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that are handed out."""
        return self.total - len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """``count`` pages of nobody else's; ``ValueError`` where there are too few (the scheduler asks first)."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        return tuple(self._free.pop() for _ in range(count))

    def release(self, pages: tuple[int, ...]) -> None:
        """Take pages back; a page that is free already is a bug and raises ``ValueError``."""
        again = set(pages) & set(self._free)
        if again or len(set(pages)) != len(pages):
            raise ValueError(f"pages released twice: {sorted(again) or pages}")
        self._free.extend(reversed(pages))


def pages_for(positions: int, page_size: int) -> int:
    """Pages that hold ``positions`` token positions."""
    return -(-positions // page_size)
