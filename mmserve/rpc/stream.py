"""The outbox of one request: events from the engine's thread, consumed by an asyncio handler.

A slow client never blocks the engine, and the outbox is bounded: for each sample, unsent deltas are merged, only the
latest unsent snapshot is kept, and of unsent drafts a few, the last of which absorbs later ones. Merged or not, a
client gets the same texts, canvases, and numbers of edits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from itertools import pairwise

from mmserve.core.events import Delta, Draft, Event, Failed, Finished, Snapshot

logger = logging.getLogger("mmserve.rpc")

#: Maximum unsent drafts of a sample: a client that keeps reading gets every step, despite scheduling delays.
DRAFTS = 8
#: Maximum positions and alternatives of the unsent drafts of a sample, unless there is only one.
DRAFTED = 1 << 14


class Outbox:
    """The event queue of one request; created and iterated on the running loop, ``put`` is thread-safe.

    The last event is a ``Failed``, or the ``Finished`` of the last of ``samples``.
    """

    def __init__(self, samples: int = 1) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._lock = threading.Lock()
        self._unsent: list[Event] = []
        self._open = samples  # samples whose last event was not put yet
        self._waking = False
        self._ready = asyncio.Event()
        self._unfinished = samples  # samples whose last event was not taken yet
        self.ended = False  # the last event was taken

    def put(self, event: Event) -> None:
        """Add ``event``, merged with unsent ones; ignored after the last event."""
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
            if threading.get_ident() == self._thread:  # waking the loop is a system call
                self._ready.set()
            else:
                self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop is closed: there is no reader any more
            logger.debug("event after the end of the server: %r", event)

    def __len__(self) -> int:
        """Number of unsent events."""
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
    """The number of ``samples`` that are not finished after ``event``."""
    return 0 if isinstance(event, Failed) else samples - isinstance(event, Finished)


def coalesce(unsent: list[Event], event: Event) -> None:
    """Add ``event`` to ``unsent``, in place; it contains at most two deltas, one snapshot and ``DRAFTS`` drafts of each
    sample, or fewer by ``DRAFTED``."""
    if isinstance(event, Draft):
        drafts = [(i, e) for i, e in enumerate(unsent) if isinstance(e, Draft) and e.sample == event.sample]
        if drafts and (len(drafts) >= DRAFTS or sum(map(_drafted, (event, *(e for _, e in drafts)))) > DRAFTED):
            at, last = drafts[-1]
            unsent[at] = event.after(last)
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


def _drafted(draft: Draft) -> int:
    """Number of positions and alternatives of ``draft``."""
    return sum(1 + len(alternatives) for *_own, alternatives in draft.rows)


def _join(unsent: list[Event], sample: int) -> None:
    """Merge consecutive deltas of ``sample``, ignoring events of other samples between them."""
    own = [i for i, e in enumerate(unsent) if isinstance(e, Delta | Snapshot | Finished) and e.sample == sample]
    for first, second in reversed(list(pairwise(own))):
        left, right = unsent[first], unsent[second]
        if isinstance(left, Delta) and isinstance(right, Delta):
            unsent[first] = Delta(left.text + right.text, sample)
            del unsent[second]
