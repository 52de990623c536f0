"""The clock of a simulation: events by time, and passes that share the cores of a host."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Events by time, and passes by work: ``cores`` are divided equally among the active passes.

    ``background``: number of permanently runnable threads of other processes, which get equal shares. ``interference``:
    slowdown of work while all cores are busy; interpolated linearly for fewer busy cores.
    """

    def __init__(self, cores: int | None, background: float = 0.0, interference: float = 1.0) -> None:
        self.now = 0.0
        self._cores, self._background, self._interference = cores, background, interference
        self._work = 0.0  # done so far by a pass active since the start
        self._events: list[tuple[float, int, Action]] = []
        self._passes: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, time: float, action: Action) -> None:
        """Schedule ``action`` at a time (seconds)."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, action))

    def run(self, seconds: float, action: Action) -> None:
        """Schedule ``action`` after ``seconds`` of work on a core."""
        self._number += 1
        heapq.heappush(self._passes, (self._work + seconds, self._number, action))

    @property
    def pending(self) -> int:
        """Number of scheduled events and active passes."""
        return len(self._events) + len(self._passes)

    def step(self) -> bool:
        """Advance to the next event; returns False if there is none."""
        if not self._events and not self._passes:
            return False
        speed = self._speed()
        ends = self.now + max(0.0, self._passes[0][0] - self._work) / speed if self._passes else float("inf")
        if self._events and self._events[0][0] <= ends:
            time, _, action = heapq.heappop(self._events)
            self._work += (time - self.now) * speed
        else:
            work, _, action = heapq.heappop(self._passes)
            time, self._work = ends, max(work, self._work)
        self.now = time
        action()
        return True

    def _speed(self) -> float:
        """Work done by each active pass in a second."""
        if self._cores is None:
            return 1.0
        threads = max(1.0, len(self._passes) + self._background)
        further = (min(threads, self._cores) - 1) / (self._cores - 1) if self._cores > 1 else 0.0
        return min(1.0, self._cores / threads) / (1 + (self._interference - 1) * further)
