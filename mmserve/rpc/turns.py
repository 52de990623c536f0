"""Serialises the copying of large messages, so that the event loop can serve other calls in between.

gRPC copies a message twice, on the event loop and without interruption, when the waiting read resumes. Most of that
time is for page faults: 1 to 2 ms per megabyte. Messages that are complete at the same time would be copied
consecutively. Here each is copied in its turn, and after a long one the next waits while others are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

#: After a turn longer than the first value, the next one begins at the earliest after the second (seconds).
LONG_SECONDS, REST_SECONDS = 0.005, 0.05

T = TypeVar("T")


class Turns:
    """Turns of awaitables on one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, read: Callable[[], Awaitable[T]]) -> T:
        """The result of ``read()``, which resumes after its first wait only when it is its turn.

        It should wait only once: while it waits again, no other call gets a turn.
        """
        return await _InTurn(read(), self._lock)


class _InTurn(Generic[T]):
    """Awaits ``coming``, and acquires ``lock`` before it resumes."""

    def __init__(self, coming: Awaitable[T], lock: asyncio.Lock) -> None:
        self._coming, self._lock = coming, lock

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._coming.__await__()
        try:
            awaited = next(steps)
            try:
                yield awaited
                yield from self._lock.acquire().__await__()
            except BaseException as error:  # noqa: BLE001 - handed on: of what was awaited, or this task's end
                yield steps.throw(error)
                return (yield from steps)
        except StopIteration as ended:
            return ended.value
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return (yield from steps)
        finally:
            if loop.time() - began > LONG_SECONDS:
                loop.call_later(REST_SECONDS, self._lock.release)
            else:
                self._lock.release()
