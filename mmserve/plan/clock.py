"""The clock of a simulation: events by time, and passes that share the cores of a host."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Events by time, and passes by work: ``cores`` are shared out equally among the passes under way.

    ``background``: threads of others that run all the time, and get their shares, too. ``crowding``: how many times as
    long work takes while all cores are busy; in between, in proportion to the further cores that are.
    """

    def __init__(self, cores: int | None, background: float = 0.0, crowding: float = 1.0) -> None:
        self.now = 0.0
        self._cores, self._background, self._crowding = cores, background, crowding
        self._work = 0.0  # that each pass under way since the beginning would have had done
        self._events: list[tuple[float, int, Action]] = []
        self._passes: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, time: float, action: Action) -> None:
        """``action`` at a time (seconds)."""
        self._number += 1
        heapq.heappush(self._events, (time, self._number, action))

    def run(self, seconds: float, action: Action) -> None:
        """``action`` once a core has worked so many ``seconds`` on it."""
        self._number += 1
        heapq.heappush(self._passes, (self._work + seconds, self._number, action))

    @property
    def pending(self) -> int:
        """Events and passes to come."""
        return len(self._events) + len(self._passes)

    def step(self) -> bool:
        """Go on to whatever is next; False = nothing is."""
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
        """Work that each pass has done in a second."""
        if self._cores is None:
            return 1.0
        threads = max(1.0, len(self._passes) + self._background)
        further = (min(threads, self._cores) - 1) / (self._cores - 1) if self._cores > 1 else 0.0
        return min(1.0, self._cores / threads) / (1 + (self._crowding - 1) * further)
