"""When a call is worth another attempt: what surely was not begun, while there is time."""

from __future__ import annotations

import math
import random
import time

from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError, ResourceExhausted, Unavailable

#: Attempts, one after another, at a server that cannot be reached or is ending. A full one is asked until the deadline.
_UNAVAILABLE = 4
#: Longer timeouts (seconds) are as good as none, and gRPC's clock would overflow.
_LONGEST = 365 * 86_400.0
_FIRST_DELAY = 0.1  # seconds; doubles with every attempt …
_LAST_DELAY = 5.0  # … up to this


class Retries:
    """How long one call of the user may still take, and whether a failed attempt is worth another."""

    def __init__(self, timeout: float) -> None:
        if not (math.isfinite(timeout) and timeout > 0):
            raise InvalidArgument.of("timeout", f"must be finite and above 0 seconds, not {timeout}")
        self._begun = time.monotonic()
        self._deadline = self._begun + min(timeout, _LONGEST)
        self._attempts = 1
        self._unavailable = 0  # of the last attempts, one after another
        self._delay = _FIRST_DELAY

    def remaining(self) -> float:
        """Seconds left for everything."""
        return max(0.0, self._deadline - time.monotonic())

    def delay(self, error: MMServeError, *, started: bool = False) -> float:
        """Seconds to wait before the next attempt, or raise ``error`` where there should be none.

        Tried again are calls that the server surely did not begin to answer (``started`` false): while it is full and
        says when it will not be, until the deadline would pass; where it cannot be reached, a few times. The error
        raised at last says how often that was, and for how long.
        """
        full = isinstance(error, ResourceExhausted) and error.retry_after is not None
        self._unavailable = self._unavailable + 1 if isinstance(error, Unavailable) else 0
        pause = self._delay * random.uniform(0.5, 1.0)  # not all who were refused together come back together
        if isinstance(error, ResourceExhausted) and error.retry_after is not None:
            pause += error.retry_after
        if started or not (full or 0 < self._unavailable < _UNAVAILABLE) or pause >= self.remaining():
            raise self._told(error)
        self._attempts += 1
        self._delay = min(2 * self._delay, _LAST_DELAY)
        return pause

    def _told(self, error: MMServeError) -> MMServeError:
        """``error`` with what was tried before it, where it is one that another attempt might not have met."""
        if self._attempts == 1:
            return error
        text = f"{error.message} (tried {self._attempts} times in {time.monotonic() - self._begun:.1f} s)"
        if isinstance(error, ResourceExhausted):
            return ResourceExhausted(text, retry_after=error.retry_after)
        return type(error)(text) if isinstance(error, Unavailable | DeadlineExceeded) else error
