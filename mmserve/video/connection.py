"""The output of one connection of a session: first messages about the connection, then the session's responses."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.core.changes import Changes
from mmserve.errors import MMServeError
from mmserve.video.indexes import Responses
from mmserve.video.messages import Acknowledged, GoAway, Numbered, Unnumbered


class Connection:
    """Iterated by the writer to the client: indices (0 = about the connection) and responses, in order.

    Begins with the acknowledgement. The iteration ends when the session is closed, or raises the error that ends the
    connection.
    """

    def __init__(self, responses: Responses, acknowledged: Callable[[], Acknowledged]) -> None:
        self._responses, self._acknowledged = responses, acknowledged
        self._changes = Changes()
        self._acknowledge = True
        self._notice: GoAway | None = None
        self._failed = False
        self.error: MMServeError | None = None  # error that ends it
        self.half_closed = False  # the client has finished sending
        self.finished: Callable[[bool], bool] = lambda half_closed: False
        self.done = False  # the iteration has ended

    @property
    def current(self) -> bool:
        """Whether it has not been ended."""
        return not self._failed

    def acknowledge(self) -> None:
        """Send an acknowledgement: a request was received, or the credit has changed."""
        self._acknowledge = True
        self.wake()

    def go_away(self, notice: GoAway) -> None:
        """Announce the end of the session."""
        self._notice = notice
        self.wake()

    def close_input(self) -> None:
        """The client has finished sending."""
        self.half_closed = True
        self.wake()

    def fail(self, error: MMServeError | None) -> None:
        """End the connection, with ``error`` unless it is None."""
        if not self._failed:
            self._failed, self.error = True, error
            self.wake()

    async def failed(self) -> None:
        """Wait until ``fail`` is called."""
        await self._changes.until(lambda: self._failed)

    def wake(self) -> None:
        """Check again what is to be sent."""
        self._changes.notify()

    def __aiter__(self) -> Connection:
        return self

    async def __anext__(self) -> tuple[int, Numbered | Unnumbered]:
        await self._changes.until(self._has_next)
        if self._failed:
            if self.error is not None:
                raise self.error
            raise StopAsyncIteration
        if self._acknowledge:
            self._acknowledge = False
            return 0, self._acknowledged()
        if self._notice is not None:
            notice, self._notice = self._notice, None
            return 0, notice
        found = self._responses.send()
        if found is None:
            self.done = True
            raise StopAsyncIteration
        return found

    def _has_next(self) -> bool:
        return (
            self._failed
            or self._acknowledge
            or self._notice is not None
            or self._responses.pending
            or self.finished(self.half_closed)
        )
