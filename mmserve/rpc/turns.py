"""One large message at a time: the event loop serves other calls after each.

gRPC copies a message twice, on the event loop and in one piece, when the read that waits for it goes on. Most of that
time goes into page faults of fresh memory: 1 to 2 ms a megabyte. Messages that are complete at the same moment would be
copied one right after another. Here each is copied in its turn, and after one that took long the next waits while
others are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

#: After a turn that took longer than the first, the next one begins no sooner than the second (seconds).
LONG_SECONDS, REST_SECONDS = 0.005, 0.05

T = TypeVar("T")


class Turns:
    """Turns of what is awaited on one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, read: Callable[[], Awaitable[T]]) -> T:
        """The result of ``read()``, which goes on after what it first waits for only when it is its turn.

        It should wait for one thing only: while it waits for a second one, no other call has a turn.
        """
        return await _InTurn(read(), self._lock)


class _InTurn(Generic[T]):
    """Waits as ``coming`` does, and for ``lock`` before ``coming`` goes on."""

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
