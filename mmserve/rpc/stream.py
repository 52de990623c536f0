"""The outbox of one request: events come from the engine's thread, and leave to an asyncio handler.

A slow client never makes the engine wait, and never makes the outbox grow: unsent deltas are joined, and of the
unsent snapshots only the latest is kept. Joined or not, the deltas a client gets add up to the same text, and the
edits that its snapshots announce to the same number.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

from mmserve.core.events import Delta, Event, Failed, Finished, Snapshot

logger = logging.getLogger("mmserve.rpc")


class Outbox:
    """Events of one request on their way out; made and iterated on the running loop, ``put`` from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._unsent: list[Event] = []
        self._closed = False  # a Finished or Failed came in: nothing may follow
        self._waking = False
        self._ready = asyncio.Event()
        self.ended = False  # a Finished or Failed went out

    def put(self, event: Event) -> None:
        """Add ``event``, joined with what is unsent; ignored after a ``Finished`` or ``Failed``."""
        with self._lock:
            if self._closed:
                logger.error("event after the last one of its request: %r", event)
                return
            self._closed = isinstance(event, Finished | Failed)
            coalesce(self._unsent, event)
            if self._waking:
                return
            self._waking = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed: nobody is left to read
            logger.debug("event after the end of the server: %r", event)

    def __len__(self) -> int:
        """Events unsent."""
        with self._lock:
            return len(self._unsent)

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> Event:
        if self.ended:
            raise StopAsyncIteration
        while (event := self._pop()) is None:
            await self._ready.wait()
            self._ready.clear()
        self.ended = isinstance(event, Finished | Failed)
        return event

    def _pop(self) -> Event | None:
        with self._lock:
            self._waking = False
            return self._unsent.pop(0) if self._unsent else None


def coalesce(unsent: list[Event], event: Event) -> None:
    """Add ``event`` to ``unsent``, in place; at most two deltas and one snapshot are ever in it."""
    if isinstance(event, Snapshot):
        for index, dropped in enumerate(unsent):
            if isinstance(dropped, Snapshot):
                del unsent[index]
                event = replace(event, edited=event.edited + dropped.edited)
                _join_around(unsent, index)
                break
    unsent.append(event)
    _join_around(unsent, len(unsent) - 1)


def _join_around(unsent: list[Event], index: int) -> None:
    """Join the deltas at ``index - 1`` and ``index``, where both are."""
    if not 0 < index < len(unsent):
        return
    left, right = unsent[index - 1], unsent[index]
    if isinstance(left, Delta) and isinstance(right, Delta):
        unsent[index - 1 : index + 1] = [Delta(left.text + right.text)]
