"""The queue of a session's requests before decoding, with limits on what a client may send ahead: pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mmserve.errors import ResourceExhausted
from mmserve.video import messages as m
from mmserve.video.overload import Origin

#: Maximum waiting requests besides pushes; a client that sends more is disconnected.
MOST_QUEUED = 1024
#: Maximum total bytes of these: a question is at most 1 MiB, but a cancelled one stays in the queue.
MOST_QUEUED_BYTES = 32 << 20


@dataclass(eq=False)
class QueuedPush:
    """A push, and its size in bytes."""

    push: m.Push
    origin: Origin
    size: int


@dataclass(eq=False)
class QueuedRequest:
    """A request other than a push, and its size in bytes."""

    item: object
    size: int


class RequestQueue:
    """Requests in the order of their arrival; ``pushes``: those that may wait besides ``MOST_QUEUED`` others."""

    def __init__(self, pushes: int) -> None:
        self._pushes = pushes
        self._queue: deque[QueuedPush | QueuedRequest] = deque()
        self._bytes = 0  # of requests besides pushes, until they are ``done``

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: QueuedPush | QueuedRequest, popped: int) -> None:
        """Append ``item``; ``popped``: number of requests that were popped and are not done.

        Raises ``ResourceExhausted`` if too many requests or bytes wait.
        """
        if len(self._queue) + popped >= MOST_QUEUED + self._pushes:
            raise ResourceExhausted(f"more than {MOST_QUEUED} requests wait; a session that sends on is ended")
        if isinstance(item, QueuedRequest):
            self._bytes += item.size
            if self._bytes > MOST_QUEUED_BYTES:
                most = f"more than {MOST_QUEUED_BYTES} bytes of requests wait"
                raise ResourceExhausted(f"{most}; a session that sends on is ended")
        self._queue.append(item)

    def pop(self) -> QueuedPush | QueuedRequest:
        """Remove and return the first item."""
        return self._queue.popleft()

    def done(self, request: QueuedRequest) -> None:
        """A request that was popped does not wait any more."""
        self._bytes -= request.size

    def clear(self) -> None:
        """Remove all items."""
        self._queue.clear()
