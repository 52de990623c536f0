"""Retries of calls that the server has not begun to answer, until the deadline."""

from __future__ import annotations

import logging
import math
import random
import time

from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError, ResourceExhausted, TLSError, Unavailable

#: Maximum timeout (seconds): longer ones are equivalent to none, and clocks would overflow.
LONGEST = 365 * 86_400.0
_FIRST_DELAY = 0.1  # seconds; doubles with every attempt …
_LAST_DELAY = 5.0  # … up to this for a full server …
_LAST_RECONNECT_DELAY = 0.5  # … or this for an unreachable server
_SILENT_SECONDS = 2.0  # without a connection, until a warning is logged

logger = logging.getLogger("mmserve.client")


def bounded(timeout: float) -> float:
    """``timeout`` (seconds), limited; raises ``InvalidArgument`` if it is not finite and above 0."""
    if not (math.isfinite(timeout) and timeout > 0):
        raise InvalidArgument.of("timeout", f"must be finite and above 0 seconds, not {timeout}")
    return min(timeout, LONGEST)


class Retries:
    """The remaining time of one call of the user, and whether a failed attempt is retried.

    ``again`` False: no retries.
    """

    def __init__(self, timeout: float, reconnect_seconds: float | None = None, *, again: bool = True) -> None:
        self._begun = time.monotonic()
        self._deadline = self._begun + bounded(timeout)
        self._reconnect_seconds = math.inf if reconnect_seconds is None else reconnect_seconds
        self._again, self._attempts = again, 1
        self._lost: float | None = None  # since when the server has been unreachable
        self._warned = False
        self._unreached: MMServeError | None = None  # the last error of an attempt that did not reach it
        self._delay = _FIRST_DELAY

    def remaining(self) -> float:
        """Remaining seconds."""
        return max(0.0, self._deadline - time.monotonic())

    def delay(self, error: MMServeError, *, started: bool = False) -> float:
        """Seconds to wait before the next attempt; raises ``error`` if there should be none.

        Until the deadline, calls that the server did not begin to answer (``started`` False) are retried: if it is full
        and reports a time to retry after, and if it is shutting down or unreachable, for at most ``reconnect_seconds``.
        The error raised at the end includes the number of attempts and their duration.
        """
        if isinstance(error, DeadlineExceeded) and self._unreached is not None and not started:
            raise self._with_attempts(self._unreached)  # the error of the time spent
        lost = isinstance(error, Unavailable) and not isinstance(error, TLSError)
        self._unreached = error if lost else None
        full = isinstance(error, ResourceExhausted) and error.retry_after is not None
        now = time.monotonic()
        self._lost = (now if self._lost is None else self._lost) if lost else None
        pause = self._delay * random.uniform(0.5, 1.0)  # jitter, so that refused clients do not retry simultaneously
        if isinstance(error, ResourceExhausted) and error.retry_after is not None:
            pause += error.retry_after
        if self._lost is not None:
            pause = min(pause, _LAST_RECONNECT_DELAY * random.uniform(0.5, 1.0))
        given_up = self._lost is not None and now + pause > self._lost + self._reconnect_seconds
        if started or not self._again or not (full or lost) or given_up or pause >= self.remaining():
            raise self._with_attempts(error)
        if self._lost is not None and not self._warned and now > self._lost + _SILENT_SECONDS:
            self._warned = True
            left = min(self.remaining(), self._lost + self._reconnect_seconds - now)
            logger.warning("%s; trying again for up to %.0f s", error.message, left)
        self._attempts += 1
        self._delay = min(2 * self._delay, _LAST_DELAY)
        return pause

    def _with_attempts(self, error: MMServeError) -> MMServeError:
        """``error`` with the number of previous attempts, if it is one that a retry might have avoided."""
        if self._attempts == 1 or isinstance(error, TLSError):
            return error
        text = f"{error.message} (tried {self._attempts} times in {time.monotonic() - self._begun:.1f} s)"
        if isinstance(error, ResourceExhausted):
            return ResourceExhausted(text, retry_after=error.retry_after)
        return type(error)(text) if isinstance(error, Unavailable | DeadlineExceeded) else error
