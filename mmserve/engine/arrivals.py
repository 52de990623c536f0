"""Requests that an engine receives from others: complete, or preceded by their K/V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mmserve.core.handover import Handover
from mmserve.core.payloads import KVChunk, PrefilledPayload
from mmserve.core.request import Request, RequestId
from mmserve.engine.migration import Migration
from mmserve.engine.outcomes import StageOutcomes
from mmserve.engine.request_state import Sink
from mmserve.engine.waiting import WaitingQueue
from mmserve.errors import TransferError
from mmserve.kv.ahead import Incoming
from mmserve.stages import Stages


class Arrivals:
    """Receives requests; methods must not be called concurrently. ``put`` runs a callable on the engine's thread."""

    def __init__(
        self,
        stages: Stages,
        queue: WaitingQueue,
        migration: Migration,
        outcomes: StageOutcomes,
        put: Callable[[Callable[[], None]], None],
        withdraw: Callable[[RequestId], None],
    ) -> None:
        self._stages, self._queue, self._migration, self._outcomes = stages, queue, migration, outcomes
        self._put, self._withdraw = put, withdraw
        self._coming: dict[RequestId, Incoming] = {}  # K/V of expected requests

    def adopt(self, handover: Handover, sink: Sink) -> None:
        """Continue a request that another engine, or a queue in front of several, has admitted; it is never refused for
        load.

        ``sink``: see ``Engine.submit``, without ``Admitted``. Raises the errors of ``submit`` for a request that cannot
        be served here, and ``TransferError`` if K/V sent ahead of it are missing.
        """
        request = self._stages.resolved(handover.request)
        handover = replace(handover, request=request)
        if self._completed(handover, sink):
            return
        if handover.payload is None:
            self._stages.capabilities.check(request)
            self._queue.check(request)
        state = self._migration.state_of(handover, sink)
        with self._queue.lock:
            self._queue.adopt(request, state.due)
            self._put(lambda: self._outcomes.adopted(state, handover))

    def expect(self, handover: Handover, number: int, sink: Sink) -> None:
        """Receive chunk ``number`` of the K/V of a request that is still prefilled elsewhere (``Ahead``), and will
        arrive by ``adopt`` unless it is cancelled.

        Raises ``TransferError`` if the chunk does not fit, or if earlier chunks are missing; the request is then no
        longer expected.
        """
        chunk, request = handover.payload, self._stages.resolved(handover.request)
        if not isinstance(chunk, KVChunk):
            raise TransferError("the payload sent ahead of a request is no K/V")
        if number == 0:
            self._begin(replace(handover, request=request), sink)
        try:
            if (incoming := self._coming.get(request.id)) is None:
                raise TransferError("K/V were received for a request that is not expected")
            incoming.add(number, chunk)
        except TransferError:
            self._withdraw(request.id)
            raise

    def discard(self, request: RequestId) -> None:
        """Expect the request no longer, and drop its K/V."""
        self._coming.pop(request, None)

    def _begin(self, handover: Handover, sink: Sink) -> None:
        request: Request = handover.request
        self._coming[request.id] = incoming = Incoming(self._stages.store)
        state = self._migration.state_of(handover, sink)
        with self._queue.lock:
            self._queue.adopt(request, state.due)
            self._put(lambda: self._migration.expect(state, incoming))

    def _completed(self, handover: Handover, sink: Sink) -> bool:
        """Whether this is the rest of an expected request; if so, complete it."""
        payload, incoming = handover.payload, self._coming.pop(handover.request.id, None)
        kv = payload.kv if isinstance(payload, PrefilledPayload) else None
        ahead = kv is not None and kv.ahead > 0
        if incoming is None and not ahead:
            return False
        if kv is None:  # it was handed over at a later stage than expected
            self._withdraw(handover.request.id)
            return False
        if ahead:
            try:
                if incoming is None:
                    raise TransferError("a request was received without the K/V sent ahead of it")
                incoming.check(kv)
            except TransferError:
                self._withdraw(handover.request.id)
                raise
        self._put(lambda: self._migration.complete(handover, sink))
        return True
