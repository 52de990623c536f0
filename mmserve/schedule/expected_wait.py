"""Prediction of the time that a new request waits before it starts, from measurements of the engine.

Work is measured in tokens of every sample: ``max_new_tokens``, and ``PROMPT_WORK`` for its prompt, so that requests for
one token, such as scores of a prompt, predict the wait for others. Only work that ended while other requests were
queued for some time is counted: without a queue, throughput is that of the clients, not of the server. Until enough is
measured, nothing is predicted and nothing is rejected. Measurements decay over ``FADE_SECONDS`` of counted time; the
predicted wait is proportional to the queued work, so it is zero with an empty queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: Work of the stages before decode, in tokens.
PROMPT_WORK = 16
#: Seconds for which requests must have been queued continuously before time is counted.
SETTLED_SECONDS = 1.0
#: Counted seconds required before anything is predicted.
LEAST_SECONDS = 2.0
#: Time constant of the exponential decay of measurements, in counted seconds.
FADE_SECONDS = 30.0
#: Minimum and maximum ``retry_after`` in seconds.
_LEAST_RETRY, _MOST_RETRY = 0.5, 30.0


def work_of(max_new_tokens: int) -> int:
    """The work of a sample of at most ``max_new_tokens`` tokens."""
    return PROMPT_WORK + max_new_tokens


@dataclass(frozen=True)
class Measured:
    """Work completed by an engine while requests were queued; times are monotonic (seconds)."""

    work: float = 0.0  # completed work, decayed
    seconds: float = 0.0  # counted time, decayed
    waiting_since: float | None = None  # since when requests are queued continuously; None = none is queued
    until: float = 0.0  # end of the counted time


def measured(before: Measured, now: float, *, waiting: bool, ended: float) -> Measured:
    """``before`` updated to ``now``: ``ended`` work was completed, and requests are queued or not (``waiting``)."""
    if before.waiting_since is None:
        return replace(before, waiting_since=now if waiting else None, until=now)
    counted = now - max(before.until, before.waiting_since + SETTLED_SECONDS)
    work, seconds = before.work, before.seconds
    if counted > 0:
        kept = math.exp(-counted / FADE_SECONDS)
        work, seconds = work * kept + ended, seconds * kept + counted
    return Measured(work, seconds, before.waiting_since if waiting else None, now)


def expected_wait(engine: Measured, ahead: float) -> float:
    """Seconds until a request with ``ahead`` work before it would start; 0 if too little is measured."""
    if ahead <= 0 or engine.seconds < LEAST_SECONDS or engine.work <= 0:
        return 0.0
    return ahead * engine.seconds / engine.work


def retry_after(wait: float, most: float, left: float | None) -> float | None:
    """Seconds after which to retry instead of waiting ``wait`` seconds; None = the request may wait.

    ``most``: maximum wait of any request in seconds, 0 = unlimited; ``left``: seconds to the request's deadline, None =
    no deadline.
    """
    limits = [limit for limit in (most or None, left) if limit is not None]
    if not limits or wait <= min(limits):
        return None
    return min(_MOST_RETRY, max(_LEAST_RETRY, wait - (most or 0.0) if wait > most else wait))
