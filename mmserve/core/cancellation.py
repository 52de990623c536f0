"""Whether a request's work is still wanted, for those who do it on other threads."""

from __future__ import annotations

import time

from mmserve.errors import DeadlineExceeded, MMServeError


class Cancellation:
    """Set once, by any thread; read by the workers of the request. ``deadline``: monotonic clock (seconds)."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._error: MMServeError | None = None

    def cancel(self, error: MMServeError) -> None:
        """End the work, with ``error``."""
        self._error = error

    def check(self) -> None:
        """Raise the error if the work was cancelled, ``DeadlineExceeded`` if its deadline has passed."""
        if self._error is not None:
            raise self._error
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded("the deadline passed while media were read")
