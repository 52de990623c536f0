"""The outbox of one request: events come from the engine's thread, and leave to an asyncio handler.

A slow client never makes the engine wait, and never makes the outbox grow: unsent deltas are joined, and of the
unsent snapshots only the latest is kept, for each sample by itself; of unsent drafts a few are, and the last of them
takes in what follows. Joined or not, the deltas a client gets add up to the same texts, its drafts to the same
canvases, and the edits that its snapshots announce to the same numbers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from itertools import pairwise

from mmserve.core.events import Delta, Draft, Event, Failed, Finished, Snapshot

logger = logging.getLogger("mmserve.rpc")

#: Drafts of a sample that may be unsent: a client that reads at all gets every step, however its process is scheduled.
DRAFTS = 8


class Outbox:
    """Events of one request on their way out; made and iterated on the running loop, ``put`` from any thread.

    The last event is a ``Failed``, or the ``Finished`` of the last of ``samples``.
    """

    def __init__(self, samples: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._unsent: list[Event] = []
        self._open = samples  # whose last event has not come in; without one nothing may follow
        self._waking = False
        self._ready = asyncio.Event()
        self._unfinished = samples  # whose last event has not gone out
        self.ended = False  # the last event went out

    def put(self, event: Event) -> None:
        """Add ``event``, joined with what is unsent; ignored after the last one."""
        with self._lock:
            if not self._open:
                logger.error("event after the last one of its request: %r", event)
                return
            self._open = _left(self._open, event)
            coalesce(self._unsent, event)
            if self._waking:
                return
            self._waking = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed: there is no reader any more
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
        self._unfinished = _left(self._unfinished, event)
        self.ended = not self._unfinished
        return event

    def _pop(self) -> Event | None:
        with self._lock:
            self._waking = False
            return self._unsent.pop(0) if self._unsent else None


def _left(samples: int, event: Event) -> int:
    """How many of ``samples`` are not at their end after ``event``."""
    return 0 if isinstance(event, Failed) else samples - isinstance(event, Finished)


def coalesce(unsent: list[Event], event: Event) -> None:
    """Add ``event`` to ``unsent``, in place; at most two deltas, one snapshot and ``DRAFTS`` drafts of a sample are
    ever in it."""
    if isinstance(event, Draft):
        drafts = [i for i, e in enumerate(unsent) if isinstance(e, Draft) and e.sample == event.sample]
        if len(drafts) >= DRAFTS:
            last = unsent[drafts[-1]]
            assert isinstance(last, Draft)
            unsent[drafts[-1]] = event.after(last)
            return
    if isinstance(event, Snapshot):
        for index, dropped in enumerate(unsent):
            if isinstance(dropped, Snapshot) and dropped.sample == event.sample:
                del unsent[index]
                event = replace(event, edited=event.edited + dropped.edited)
                _join(unsent, event.sample)
                break
    unsent.append(event)
    if isinstance(event, Delta):
        _join(unsent, event.sample)


def _join(unsent: list[Event], sample: int) -> None:
    """Join the deltas of ``sample`` that follow one another, whatever of other samples is between them."""
    own = [i for i, e in enumerate(unsent) if isinstance(e, Delta | Snapshot | Finished) and e.sample == sample]
    for first, second in reversed(list(pairwise(own))):
        left, right = unsent[first], unsent[second]
        if isinstance(left, Delta) and isinstance(right, Delta):
            unsent[first] = Delta(left.text + right.text, sample)
            del unsent[second]
