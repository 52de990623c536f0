"""The queue of responses of one session: kept until the client confirms them, over any number of connections."""

from __future__ import annotations

import time
from collections.abc import Callable

from mmserve.errors import FailedPrecondition, MMServeError, ResourceExhausted
from mmserve.video import messages as m
from mmserve.video.connection import Connection
from mmserve.video.indexes import Responses

#: Multiple of ``outbox_bytes`` of unsent responses above which the session ends, however often it is resumed.
_MOST_OUTBOXES = 4
#: Retry delay (seconds) for resuming, for a client that did not read its responses.
_RETRY_AFTER = 0.1


class ResponseQueue:
    """Used on the event loop of its session.

    ``acknowledged``: the first message of a connection; ``finished``: whether a connection is complete, given that its
    client has finished sending. ``lost`` is called with a connection whose client does not read, ``end`` with the error
    of a session whose client never does.
    """

    def __init__(
        self,
        outbox_bytes: int,
        acknowledged: Callable[[], m.Acknowledged],
        finished: Callable[[bool], bool],
        lost: Callable[[Connection], None],
        end: Callable[[MMServeError], None],
    ) -> None:
        self._outbox_bytes, self._acknowledged, self._finished = outbox_bytes, acknowledged, finished
        self._lost, self._end = lost, end
        self.responses = Responses(outbox_bytes)
        self.detached: float | None = time.monotonic()  # since when there has been no connection
        self._connection: Connection | None = None
        self._most_unsent = outbox_bytes  # unsent bytes above which the connection is closed

    def attach(self) -> Connection:
        """Create a connection, which replaces any other."""
        self.fail(FailedPrecondition("the session was resumed on another connection"))
        self.detached = None
        self._most_unsent = self.responses.unsent_bytes + self._outbox_bytes
        self._connection = Connection(self.responses, self._acknowledged)
        self._connection.finished = self._finished
        return self._connection

    def detach(self, connection: Connection) -> bool:
        """``connection`` is lost. Returns False if it was replaced before."""
        if connection is not self._connection:
            return False
        self._connection, self.detached = None, time.monotonic()
        return True

    def report(self, response: m.Numbered) -> None:
        """Send a response."""
        self.responses.add(response)
        self.wake()
        most = _MOST_OUTBOXES * self._outbox_bytes
        if self.responses.unsent_bytes > most:
            why = f"more than {most} bytes of responses wait to be read, {_MOST_OUTBOXES} times [video] outbox_bytes"
            self._end(ResourceExhausted(f"{why}; open a new session and read them"))
        elif self._connection is not None and self.responses.unsent_bytes > self._most_unsent:
            connection = self._connection
            why = f"more than {self._outbox_bytes} bytes of responses wait to be read ([video] outbox_bytes)"
            connection.fail(ResourceExhausted(f"{why}; resume the session and read them", retry_after=_RETRY_AFTER))
            self._lost(connection)

    def acknowledge(self) -> None:
        """Acknowledge: a request was received, or the credit has changed."""
        if self._connection is not None:
            self._connection.acknowledge()

    def go_away(self, notice: m.GoAway) -> None:
        """Announce a planned end."""
        if self._connection is not None:
            self._connection.go_away(notice)

    def wake(self) -> None:
        """Wake the connection to check for messages."""
        if self._connection is not None:
            self._connection.wake()

    def fail(self, error: MMServeError | None) -> None:
        """End the connection, if there is one, with ``error`` unless it is None."""
        if self._connection is not None:
            self._connection.fail(error)
