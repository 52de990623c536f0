"""Decisions about slow workers: when they get no more work, when they get work again, and when they are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: Seconds that a worker must be slow continuously before any action.
SUSTAINED = 2.0
#: Seconds without work until a worker is tried again.
DRAIN_SECONDS = 5.0
#: Seconds after a worker got work again within which it is replaced, not drained, if it is slow.
PROBATION = 60.0


class Action(Enum):
    """The action for a worker."""

    DRAIN = "gets no work, and its requests continue on other workers"
    RETURN = "gets work again"
    REPLACE = "is replaced"


@dataclass
class _WorkerState:
    slow_since: float | None = None
    drained_at: float | None = None
    returned_at: float = float("-inf")


class Draining:
    """``factor``: slowness from which a worker counts as slow; 0 = never. All times are on one clock (seconds)."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._workers: dict[str, _WorkerState] = {}

    def due_action(
        self, now: float, worker: str, slowness: float, *, redundant: bool, replaceable: bool
    ) -> Action | None:
        """The action that is due for ``worker``, whose passes take ``slowness`` times as long as usual; None if none.

        ``redundant``: whether other workers have all its roles; ``replaceable``: whether a spare is ready.
        """
        if not self._factor:
            return None
        state = self._workers.setdefault(worker, _WorkerState())
        if state.drained_at is not None:
            if now - state.drained_at < DRAIN_SECONDS:
                return None
            if slowness >= self._factor / 2:
                return Action.REPLACE
            state.slow_since, state.drained_at, state.returned_at = None, None, now
            return Action.RETURN
        if slowness < self._factor:
            state.slow_since = None
            return None
        if state.slow_since is None:
            state.slow_since = now
        if now - state.slow_since < SUSTAINED:
            return None
        if redundant and now - state.returned_at > PROBATION:
            state.drained_at = now
            return Action.DRAIN
        return Action.REPLACE if redundant or replaceable else None

    def discard(self, worker: str) -> None:
        """The worker has exited."""
        self._workers.pop(worker, None)
