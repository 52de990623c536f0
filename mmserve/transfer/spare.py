"""A pool of unused buffers for reuse: new pages from the kernel take longer."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

#: Bytes of the smallest buffer.
_LEAST = 1 << 16


class Buffer(Protocol):
    """Memory of ``capacity`` bytes."""

    @property
    def capacity(self) -> int: ...


B = TypeVar("B", bound=Buffer)


class Spare(Generic[B]):
    """At most ``most`` bytes of buffers. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._buffers = most, list[B]()

    def take(self, size: int) -> B | None:
        """The smallest buffer of at least ``size`` bytes, unless it is much too large; None if there is none."""
        fits = [each for each in self._buffers if size <= each.capacity <= 4 * max(size, _LEAST)]
        if not fits:
            return None
        found = min(fits, key=lambda each: each.capacity)
        self._buffers.remove(found)
        return found

    def put(self, buffer: B) -> bool:
        """Add a buffer; returns False if the pool is full."""
        if buffer.capacity + sum(each.capacity for each in self._buffers) > self._most:
            return False
        self._buffers.append(buffer)
        return True

    def clear(self) -> list[B]:
        """Remove and return all buffers."""
        found, self._buffers = self._buffers, []
        return found


def capacity_for(size: int) -> int:
    """Capacity in bytes of a new buffer for ``size`` bytes, rounded so that similar sizes can reuse it."""
    return max(_LEAST, 1 << (size - 1).bit_length())
