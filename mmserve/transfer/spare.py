"""Buffers that nobody uses any more, and that are kept to be written again: new pages of the kernel take longer."""

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
    """At most ``most`` bytes of them. Not for several threads at once."""

    def __init__(self, most: int) -> None:
        self._most, self._buffers = most, list[B]()

    def take(self, size: int) -> B | None:
        """The smallest with room for ``size`` bytes, unless it is much too large; None where there is none."""
        fits = [each for each in self._buffers if size <= each.capacity <= 4 * max(size, _LEAST)]
        if not fits:
            return None
        found = min(fits, key=lambda each: each.capacity)
        self._buffers.remove(found)
        return found

    def give(self, buffer: B) -> bool:
        """Keep ``buffer``; False where there is no room for it."""
        if buffer.capacity + sum(each.capacity for each in self._buffers) > self._most:
            return False
        self._buffers.append(buffer)
        return True

    def clear(self) -> list[B]:
        """All of them, which are not kept any longer."""
        found, self._buffers = self._buffers, []
        return found


def capacity_for(size: int) -> int:
    """Bytes of a new buffer for ``size`` bytes, so that others of like size find room there later."""
    return max(_LEAST, 1 << (size - 1).bit_length())
