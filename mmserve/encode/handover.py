"""Transfer of a clip's frames from the thread that reads them to the one that runs the tower, in chunks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from mmserve.encode.child import Planned
from mmserve.encode.sampling import Sampled

T = TypeVar("T")
#: Interval in seconds for checking whether the request was cancelled.
_POLL = 0.02
#: Maximum number of chunks queued for the tower.
_MAX_QUEUED = 2


class Handover(Generic[T]):
    """Chunks of ``size`` frames, each converted by ``make`` in the thread that reads the file.

    ``check`` raises to stop both sides. ``while_waiting`` is entered while the reader waits for the other side.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[list[Sampled]], T],
        check: Callable[[], None],
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._size, self._make, self.check, self._while_waiting = size, make, check, while_waiting
        self._changed = threading.Condition()
        self._ready: deque[Planned | T] = deque()
        self._frames: list[Sampled] = []
        self._planned = False
        self._taken = self._skipped = 0  # frames so far, and frames skipped in a repeated read

    def take(self, item: Planned | Sampled) -> None:
        """As ``child.Take``; blocks while the queue of chunks is full."""
        if isinstance(item, Planned):
            if not self._planned:
                self._planned = True
                self._put(item)
        elif self._skipped:
            self._skipped -= 1
        else:
            self._taken += 1
            self._frames.append(item)
            if len(self._frames) == self._size:
                self.flush()

    def restart(self) -> None:
        """Prepare for reading the file again from its beginning: frames that were already taken are skipped."""
        self._skipped = self._taken

    def flush(self) -> None:
        """Pass on the remaining frames as a smaller chunk."""
        if self._frames:
            frames, self._frames = self._frames, []
            self._put(self._make(frames))

    def chunks(self, reading: Future[None]) -> Generator[Planned | T, None, None]:
        """The chunks, until ``reading`` has ended; its exception is raised as soon as it occurs."""
        while True:
            with self._changed:
                while not self._ready and not reading.done():
                    self._changed.wait(_POLL)
                    self.check()
            if reading.done() and reading.exception() is not None:
                reading.result()
            with self._changed:
                if not self._ready:
                    return
                item = self._ready.popleft()
                self._changed.notify_all()
            yield item

    def _put(self, item: Planned | T) -> None:
        with self._changed:
            full = len(self._ready) >= _MAX_QUEUED
        if full:
            with self._while_waiting(), self._changed:
                while len(self._ready) >= _MAX_QUEUED:
                    self._changed.wait(_POLL)
                    self.check()
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()
