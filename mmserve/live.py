"""The requests of an engine that have not ended: how each advances from stage to stage, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from mmserve.core.events import Failed
from mmserve.core.request import TERMINAL, RequestId, Stage, advance
from mmserve.core.samples import samples
from mmserve.errors import DeadlineExceeded, Internal, MMServeError
from mmserve.kv.pool import PagePool
from mmserve.record import Record
from mmserve.stages import Stages
from mmserve.waiting import WaitingQueue

logger = logging.getLogger("mmserve.engine")


class LiveRequests:
    """The table of them, ``by_id``; only the engine's thread touches it."""

    def __init__(self, queue: WaitingQueue, pool: PagePool, stages: Stages) -> None:
        self.by_id: dict[RequestId, Record] = {}
        self._queue, self._pool, self._stages = queue, pool, stages

    def __iter__(self) -> Iterator[Record]:
        """Over those there are now; they may end meanwhile."""
        return iter(list(self.by_id.values()))

    def advance(self, record: Record, stage: Stage) -> None:
        """Go on to ``stage``; ``ValueError`` where that does not follow."""
        if record.stage is Stage.QUEUED:
            self._queue.leave(record.request.tenant, record.samples, record.work)
        record.stage = advance(record.stage, stage)

    def split(self, record: Record) -> None:
        """A record for each sample of a request, in its place."""
        del self.by_id[record.request.id]
        self.by_id.update((each.request.id, each) for each in record.split())

    def release(self, record: Record) -> None:
        """A record has ended: nothing of it stays."""
        if record.stage not in TERMINAL:
            raise ValueError(f"released while {record.stage.name}")
        for sample in samples(record.request):  # encoded, but not yet split, it has left something for each
            self._stages.release(sample.id)
        self._pool.release(record.pages.ids)
        del self.by_id[record.request.id]
        record.call.records.remove(record)
        self._queue.end(record.samples)

    def end_failed(self, record: Record) -> None:
        """End a record whose client has its error; not while a worker has it."""
        if record.stage not in TERMINAL:
            self.advance(record, Stage.FAILED)
        self.release(record)

    def fail(self, record: Record, error: MMServeError) -> None:
        """Tell the client now, once; free its samples now, or when the workers that hold them report."""
        if record.call.failed:
            return
        record.call.failed = True
        record.call.cancellation.cancel(error)
        for each in list(record.call.records):
            if not each.held:
                self.end_failed(each)
        record.call.sink(Failed(error))

    def fail_all(self, error: MMServeError) -> None:
        """End every request with ``error``."""
        for record in self:
            self.fail(record, error)

    def recover(self, error: MMServeError) -> None:
        """After a bug in the engine itself nothing is known of anybody's state: every request ends with ``error``."""
        for record in self:
            told, record.call.failed = record.doomed, True
            record.call.cancellation.cancel(error)
            if not record.held:  # else its worker's report ends it
                self.end_failed(record)
            if not told:
                record.call.sink(Failed(error))

    def cancel(self, request: RequestId, error: MMServeError) -> None:
        """End a request, all of its samples, with ``error``; nothing where it ended already."""
        record = next((r for r in self if r.call.id == request), None)
        if record is not None:
            self.fail(record, error)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed; ``now`` is on the monotonic clock (seconds)."""
        for record in self:
            if record.request.deadline is not None and record.request.deadline <= now:
                self.fail(record, DeadlineExceeded(f"the deadline passed while the request was {record.stage.name}"))

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has no error yet, on the monotonic clock (seconds)."""
        deadlines = (r.request.deadline for r in self if not r.doomed)
        return min((deadline for deadline in deadlines if deadline), default=None)


def typed(error: BaseException, record: Record) -> MMServeError:
    """``error`` itself if it is one of ours; a bug becomes ``Internal`` with an id that the log has too."""
    if isinstance(error, MMServeError):
        return error
    return Internal.logged(error, f"request {record.request.id} while {record.stage.name}", logger)
