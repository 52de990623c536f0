"""Cancellation of a request's work on other threads."""

from __future__ import annotations

import time

from mmserve.errors import DeadlineExceeded, MMServeError


class Cancellation:
    """A cancellation flag, set once by any thread and read by the request's workers. ``deadline``: monotonic clock
    (s)."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._error: MMServeError | None = None

    def cancel(self, error: MMServeError) -> None:
        """Cancel the work; ``check`` then raises ``error``."""
        self._error = error

    def check(self) -> None:
        """Raises the error if the work was cancelled, ``DeadlineExceeded`` if its deadline has passed."""
        if self._error is not None:
            raise self._error
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded("the deadline passed while media were read")
