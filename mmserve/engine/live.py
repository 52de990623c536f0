"""The live requests of an engine: their transitions from stage to stage, and their end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

from mmserve.core.events import Failed
from mmserve.core.request import TERMINAL, RequestId, Stage, advance
from mmserve.core.samples import samples
from mmserve.engine.request_state import RequestState
from mmserve.engine.waiting import WaitingQueue
from mmserve.errors import Cancelled, DeadlineExceeded, Internal, MMServeError
from mmserve.kv.pool import PagePool
from mmserve.observe.logs import about
from mmserve.stages import Stages

logger = logging.getLogger("mmserve.engine")


class LiveRequests:
    """The table of live requests, ``by_id``; only for the engine's thread."""

    def __init__(self, queue: WaitingQueue, pool: PagePool, stages: Stages) -> None:
        self.by_id: dict[RequestId, RequestState] = {}
        self._queue, self._pool, self._stages = queue, pool, stages

    def __iter__(self) -> Iterator[RequestState]:
        """Iterates over the current requests, which may end meanwhile."""
        return iter(list(self.by_id.values()))

    def by_stage(self) -> dict[str, int]:
        """The number of samples in each stage, by its name in lower case; thread-safe, and possibly slightly
        outdated."""
        found = Counter(state.stage for state in list(self.by_id.values()))
        return {stage.name.lower(): found[stage] for stage in Stage if stage not in TERMINAL}

    def described(self) -> Iterator[str]:
        """The id and stage of each sample, and whether a worker runs it; thread-safe, and possibly slightly
        outdated."""
        for name, state in list(self.by_id.items()):
            yield f"{name} ({state.stage.name}{', in a pass' if state.in_flight else ''})"

    def advance(self, state: RequestState, stage: Stage) -> None:
        """Advance ``state`` to ``stage``; raises ``ValueError`` for an invalid transition."""
        if state.stage is Stage.QUEUED:
            self._queue.remove(state.request.tenant, state.samples, state.work, state.due)
        state.enter(advance(state.stage, stage))

    def split(self, state: RequestState) -> None:
        """Replace a request's state by one for each of its samples."""
        del self.by_id[state.request.id]
        self.by_id.update((each.request.id, each) for each in state.split())

    def release(self, state: RequestState) -> None:
        """Free all resources of a request, or sample, that has ended: if one cannot be freed, all others, before the
        exception is raised."""
        if state.stage not in TERMINAL:
            raise ValueError(f"released while {state.stage.name}")
        with ExitStack() as ending:  # in reverse order
            ending.callback(self._queue.end, state.samples)
            ending.callback(state.group.members.remove, state)
            ending.callback(self.by_id.pop, state.request.id)
            ending.callback(self._pool.release, state.pages.ids)
            for sample in samples(state.request):  # encoded, but not split yet: each sample may hold resources
                self._stages.release(sample.id)

    def end_failed(self, state: RequestState) -> None:
        """End a request whose client has its error, or gets it; must not be held by a worker. Errors are logged: others
        must end, too."""
        try:
            try:
                if state.stage not in TERMINAL:
                    self.advance(state, Stage.FAILED)
            finally:
                if state.stage not in TERMINAL:
                    state.enter(Stage.FAILED)
                self.release(state)
        except Exception:
            logger.exception("request %s was not completely released", state.request.id)

    def fail(self, state: RequestState, error: MMServeError) -> None:
        """Send the client its error, once; free its samples now, or when the workers that hold them report."""
        if not state.group.failed:
            self._abort(state, error)
            state.group.sink(Failed(error))

    def _abort(self, state: RequestState, error: MMServeError) -> None:
        state.group.failed = True
        state.group.cancellation.cancel(error)
        for each in list(state.group.members):
            if not each.in_flight:
                self.end_failed(each)

    def fail_all(self, error: MMServeError) -> None:
        """End every request with ``error``."""
        for state in self:
            self.fail(state, error)

    def recover(self, error: MMServeError) -> None:
        """End every request with ``error`` after a bug in the engine: no request's state is reliable any more."""
        for state in self:
            aborted, state.group.failed = state.aborted, True
            state.group.cancellation.cancel(error)
            if not state.in_flight:  # otherwise its worker's report ends it
                self.end_failed(state)
            if not aborted:
                state.group.sink(Failed(error))

    def cancel(self, request: RequestId, error: MMServeError) -> None:
        """End a request and all its samples with ``error``; no effect if it has ended.

        Its first sample, which has its id, may have been received separately while the others are in another engine.
        """
        for state in self:
            if state.group.id == request:
                self.fail(state, error)

    def withdraw(self, request: RequestId) -> None:
        """End a request, or a sample received separately with this id, without an event."""
        state = self.by_id.get(request)
        if state is not None and not state.group.failed:
            self._abort(state, Cancelled("the request continues on another engine"))

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed; ``now`` is on the monotonic clock (seconds)."""
        for state in self:
            if state.request.deadline is not None and state.request.deadline <= now:
                self.fail(state, DeadlineExceeded(f"the deadline passed while the request was {state.stage.name}"))

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has no error yet, on the monotonic clock (seconds)."""
        deadlines = (r.request.deadline for r in self if not r.aborted)
        return min((deadline for deadline in deadlines if deadline), default=None)


def typed(error: BaseException, state: RequestState) -> MMServeError:
    """``error`` itself if it is an ``MMServeError``; otherwise ``Internal`` with an id that is also in the log."""
    if isinstance(error, MMServeError):
        return error
    where = f"request {state.request.id} while {state.stage.name}"
    return Internal.logged(error, where, logger, about(state.request))
