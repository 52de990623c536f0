"""The decode stage: canvases are denoised step by step into answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmserve.constraint.restored import Restorer
from mmserve.core.isolation import run_isolated
from mmserve.core.payloads import CanvasPayload, KVState, PrefilledPayload
from mmserve.core.request import Request, RequestId
from mmserve.decode.extensions.base import extension_of
from mmserve.decode.extensions.constraint import Constraint
from mmserve.decode.state import Answer, Stepped
from mmserve.decode.step import step
from mmserve.kv.ahead import Incoming
from mmserve.kv.pool import pages_for
from mmserve.kv.table import PageTable
from mmserve.memory import trim_soon
from mmserve.models.base import Model
from mmserve.observe.traces import observed, stage_pass
from mmserve.transfer.base import Transport


class DecodeStage:
    """Decode of one model: canvases arrive by ``to_decode``. Used by a single worker."""

    def __init__(self, model: Model, decoder: Any, to_decode: Transport) -> None:
        self._decoder, self._to_decode = decoder, observed(to_decode, "decode")
        self._restorer = Restorer(model)
        self.live: dict[RequestId, Any] = {}  # states of the decoder
        self._expected: dict[RequestId, PageTable] = {}  # pages of requests that come from other stores
        self._incoming: dict[RequestId, Incoming] = {}  # K/V that arrive before their requests
        self.constraint_steps = self.constraint_fallbacks = self.constraint_late = 0  # of ended requests

    def expect(self, request: RequestId, pages: PageTable) -> None:
        """Expect a request that was prefilled, or partly decoded, over another store; ``pages`` are its pages here."""
        self._expected[request] = pages
        if (incoming := self._incoming.get(request)) is not None:
            incoming.open(np.asarray(pages.ids, np.int64))

    def expect_ahead(self, request: RequestId, incoming: Incoming) -> None:
        """Expect K/V of a request that is still in prefill in another process, by ``incoming``; ``expect`` follows."""
        self._incoming[request] = incoming

    def admit(self, request: Request, pages: PageTable) -> None:
        """Take over an expected request; ``decode`` also does this by itself.

        Raises ``TransferError`` if the received state does not match this store.
        """
        self.expect(request.id, pages)
        self._states([request])

    def move(self, request: RequestId, to: Transport) -> None:
        """Send a canvas on between two steps, and forget it here; the caller must release its pages."""
        state = self.live[request]
        to.send(request, self._decoder.payload(state))
        del self.live[request]

    def decode(self, batch: list[Request]) -> list[Stepped | BaseException]:
        """Run one step of each request; returns the result of the step or the error, in order."""
        opened = [outcome for request in batch for outcome in run_isolated(self._states, [request])]
        ran = iter(step(self._decoder, [s for s in opened if not isinstance(s, BaseException)]))
        return [state if isinstance(state, BaseException) else next(ran) for state in opened]

    def finished(self, request: RequestId) -> Answer:
        """The answer of a request that ended in decode."""
        answer: Answer = self._decoder.answer(self.live[request])
        return answer

    @torch.inference_mode()
    def whole(self, request: RequestId, came: PrefilledPayload | CanvasPayload) -> PrefilledPayload | CanvasPayload:
        """The state received for a request before its first step here, merged with the K/V that arrived ahead of it.

        Raises ``TransferError`` if some of these are missing.
        """
        incoming = self._incoming.get(request)
        if not isinstance(came, PrefilledPayload) or not came.kv.ahead or incoming is None:
            return came
        incoming.finish(came.kv)
        store, positions = self._decoder.parts.store, came.kv.positions
        pages = np.asarray(self._expected[request].ids, np.int64)[: pages_for(positions, store.page_size)]
        return replace(came, kv=KVState(positions, store.page_size, store.read_pages(pages)))

    def release(self, request: RequestId) -> None:
        """Forget a request; the caller must release its pages. Not while the worker runs it."""
        self._to_decode.drop(request)
        self._expected.pop(request, None)
        if (incoming := self._incoming.pop(request, None)) is not None:
            incoming.close()  # before its pages are reused
        ended = self.live.pop(request, None)
        constraint = None if ended is None else extension_of(ended.extensions, Constraint)
        if constraint is not None:
            took = constraint.session.stats.report()
            self.constraint_steps += took.steps
            self.constraint_fallbacks += took.fallbacks
            self.constraint_late += took.late
            trim_soon()  # its parsers are freed

    @property
    def held(self) -> int:
        """Number of requests with state in this stage."""
        return len(self.live) + len(self._incoming)

    def _states(self, requests: list[Request]) -> list[Any]:
        for request in requests:
            if request.id in self.live:
                continue
            with stage_pass("open", [request]):
                self.live[request.id] = self._opened(request, self._to_decode.receive(request.id))
        return [self.live[request.id] for request in requests]

    def _opened(self, request: Request, came: Any) -> Any:
        if not isinstance(came, PrefilledPayload | CanvasPayload):
            return self._decoder.open(request, came)
        if (incoming := self._incoming.pop(request.id, None)) is not None:
            if came.prefilled.kv.ahead:
                incoming.finish(came.prefilled.kv)
            incoming.close()
        constraint = came.constraint
        session = None if constraint is None else self._restorer.restored(request, constraint)
        return self._decoder.restored(request, came, self._expected.pop(request.id), session)
