"""How long a new request would wait to start, foreseen from what the engine has been measured to do.

Work is counted in tokens asked for: ``max_new_tokens`` of every sample. What counts is the work that ended while other
requests had been waiting for a while: the pace of a server with places to spare is the pace of its clients, not its
own. Until then nothing is foreseen, and nothing is refused for it. The measurement fades over
``FADE_SECONDS`` of such time; the wait is in proportion to the work that waits now, so that an empty queue is no wait,
whatever was measured before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: Requests must have waited without a break for so long before it counts (seconds).
SETTLED_SECONDS = 1.0
#: Time that must have counted before anything is foreseen (seconds).
LEAST_SECONDS = 2.0
#: After so many seconds that count, what was measured has lost all but 1/e of its weight.
FADE_SECONDS = 30.0
#: When a client may try again, at least and at most (seconds).
_LEAST_RETRY, _MOST_RETRY = 0.5, 30.0


@dataclass(frozen=True)
class Measured:
    """What an engine ended while requests waited; times are on the monotonic clock (seconds)."""

    work: float = 0.0  # that ended, faded
    seconds: float = 0.0  # in which it did, faded
    waiting_since: float | None = None  # requests wait without a break; None = none waits
    until: float = 0.0  # how far time has been counted


def measured(before: Measured, now: float, *, waiting: bool, ended: float) -> Measured:
    """``before`` and what happened until ``now``: ``ended`` work, with or without requests that wait since then."""
    if before.waiting_since is None:
        return replace(before, waiting_since=now if waiting else None, until=now)
    counted = now - max(before.until, before.waiting_since + SETTLED_SECONDS)
    work, seconds = before.work, before.seconds
    if counted > 0:
        kept = math.exp(-counted / FADE_SECONDS)
        work, seconds = work * kept + ended, seconds * kept + counted
    return Measured(work, seconds, before.waiting_since if waiting else None, now)


def expected_wait(engine: Measured, ahead: float) -> float:
    """Seconds until a request would start that has so much work waiting before it; 0 while too little is measured."""
    if ahead <= 0 or engine.seconds < LEAST_SECONDS or engine.work <= 0:
        return 0.0
    return ahead * engine.seconds / engine.work


def retry_after(wait: float, most: float, left: float | None) -> float | None:
    """When to try again (seconds) instead of waiting ``wait`` seconds; None = the request may wait.

    ``most``: seconds that any request may wait, 0 = any; ``left``: seconds to the request's deadline, None = it has
    none.
    """
    limits = [limit for limit in (most or None, left) if limit is not None]
    if not limits or wait <= min(limits):
        return None
    return min(_MOST_RETRY, max(_LEAST_RETRY, wait - (most or 0.0) if wait > most else wait))
