"""Decisions about slow workers: when they get no more work, when they get work again, and when they are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: Seconds that a worker must be slow continuously before any action.
SUSTAINED = 2.0
#: Seconds without work until a worker is tried again.
REST = 5.0
#: Seconds after being slow within which a worker is not tried once more.
PROBATION = 60.0


class Act(Enum):
    """The action for a worker."""

    DRAIN = "gets no work, and what it has goes on elsewhere"
    RETURN = "gets work again"
    REPLACE = "is replaced"


@dataclass
class _Seen:
    slow_since: float | None = None
    drained_at: float | None = None
    returned_at: float = float("-inf")


class Draining:
    """``factor``: slowness from which a worker counts as slow; 0 = never. All times are on one clock (seconds)."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seen: dict[str, _Seen] = {}

    def due_action(self, now: float, worker: str, slowness: float, *, spared: bool, replaceable: bool) -> Act | None:
        """The action that is due for ``worker``, whose passes take ``slowness`` times as long as usual; None if none.

        ``spared``: whether other workers have all its roles; ``replaceable``: whether a spare is ready.
        """
        if not self._factor:
            return None
        seen = self._seen.setdefault(worker, _Seen())
        if seen.drained_at is not None:
            if now - seen.drained_at < REST:
                return None
            if slowness >= self._factor / 2:
                return Act.REPLACE
            seen.slow_since, seen.drained_at, seen.returned_at = None, None, now
            return Act.RETURN
        if slowness < self._factor:
            seen.slow_since = None
            return None
        if seen.slow_since is None:
            seen.slow_since = now
        if now - seen.slow_since < SUSTAINED:
            return None
        if spared and now - seen.returned_at > PROBATION:
            seen.drained_at = now
            return Act.DRAIN
        return Act.REPLACE if spared or replaceable else None

    def discard(self, worker: str) -> None:
        """The worker has exited."""
        self._seen.pop(worker, None)
