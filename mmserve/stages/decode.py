"""The decode stage: canvases, step by step, to answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmserve.core.constraint import Template
from mmserve.core.events import CommittedToken, ConstraintStats
from mmserve.core.payloads import CanvasPayload, PrefilledPayload
from mmserve.core.request import Request, RequestId
from mmserve.decode.constrained.restored import Restorer
from mmserve.decode.constrained.state import known_tokens
from mmserve.decode.state import Stepped
from mmserve.kv.table import PageTable
from mmserve.memory import trim_soon
from mmserve.models.base import Model
from mmserve.transfer.base import Transport
from mmserve.worker import run_isolated


@dataclass(frozen=True)
class Answer:
    """What came of a request that ended in decode; ``tokens`` only if it asked for them."""

    text: str
    completion_tokens: int
    forwards: int
    recomputed_tokens: int
    edits: int
    kv_positions: int
    tokens: tuple[CommittedToken, ...]
    companion_forwards: int
    warnings: tuple[str, ...] = ()
    closed_by_budget: bool = False
    log_weight: float | None = None
    constraint: ConstraintStats | None = None
    holes: tuple[str, ...] = ()  # of a template


class DecodeStage:
    """Decode of one model: canvases come by ``to_decode``. For one worker."""

    def __init__(self, model: Model, decoder: Any, to_decode: Transport) -> None:
        self._model, self._decoder, self._to_decode = model, decoder, to_decode
        self._restorer = Restorer(model)
        self.live: dict[RequestId, Any] = {}  # the decoder's states
        self.constraint_steps = self.constraint_fallbacks = self.constraint_late = 0  # of requests that ended

    def admit(self, request: Request, pages: PageTable) -> None:
        """Take over a request that was prefilled, or was being decoded, over another store; ``pages`` are its own here.

        Where both stages are in one process ``decode`` does that by itself. Raises ``TransferError`` where what came
        does not fit this store.
        """
        payload = self._to_decode.receive(request.id)
        assert isinstance(payload, PrefilledPayload | CanvasPayload), "live states come with pages of this store"
        constraint = payload.constraint
        restored = None if constraint is None else self._restorer.restored(request, constraint).begun(request)
        self.live[request.id] = self._decoder.restored(request, payload, pages, restored)

    def move(self, request: RequestId, to: Transport) -> None:
        """Send a canvas on as it is between two steps, and forget it here; its pages are for others to take back."""
        state = self.live[request]
        to.send(request, self._decoder.payload(state))
        del self.live[request]

    def decode(self, batch: list[Request]) -> list[Stepped | BaseException]:
        """One step of each request."""
        opened = [outcome for request in batch for outcome in run_isolated(self._states, [request])]
        proposed = iter(run_isolated(self._decoder.propose, [s for s in opened if not isinstance(s, BaseException)]))
        outcomes: list[Stepped | BaseException] = []
        for state in opened:
            if isinstance(state, BaseException):
                outcomes.append(state)
            elif (failure := next(proposed)) is not None:
                outcomes.append(failure)
            else:
                outcomes += run_isolated(self._commit, [state])
        return outcomes

    def finished(self, request: RequestId) -> Answer:
        """What came of a request that ended in decode."""
        state = self.live[request]
        tokens = self._decoder.tokens(state) if state.request.streaming.tokens else ()
        held = state.held
        if self._model.spec.causal:  # what a draft left behind the answer's end is of no use
            held = min(held, state.canvas.prompt_length + state.text.tokens - state.evicted)
        counts = (state.text.tokens, state.forwards, state.recomputed, state.edits, held)
        beside = 0 if state.companion is None else state.companion.forwards
        constrained = state.constrained
        if constrained is None:
            return Answer(state.text.text, *counts, tokens, beside)
        asked = state.request.constraint
        whole = asked is not None and isinstance(asked.kind, Template) and not state.text.stopped
        return Answer(
            state.text.text,
            *counts,
            tokens,
            beside,
            constrained.warnings,
            constrained.witness.cut,
            constrained.sampled.log_weight if constrained.sampled is not None else None,
            constrained.meter.stats(),
            constrained.holes(known_tokens(state.canvas)) if whole else (),
        )

    def release(self, request: RequestId) -> None:
        """Forget a request; its pages are for others to take back. Not while the worker runs it."""
        self._to_decode.drop(request)
        ended = self.live.pop(request, None)
        if ended is not None and ended.constrained is not None:
            took = ended.constrained.meter.stats()
            self.constraint_steps += took.steps
            self.constraint_fallbacks += took.fallbacks
            self.constraint_late += took.late
            trim_soon()  # its parsers have gone

    @property
    def held(self) -> int:
        """Requests of which anything is kept here."""
        return len(self.live)

    def _states(self, requests: list[Request]) -> list[Any]:
        for request in requests:
            if request.id not in self.live:
                self.live[request.id] = self._decoder.open(request, self._to_decode.receive(request.id))
        return [self.live[request.id] for request in requests]

    def _commit(self, states: list[Any]) -> list[Stepped]:
        outcomes = [self._decoder.commit(state) for state in states]
        for state, outcome in zip(states, outcomes, strict=True):
            if outcome.reason == "end" and state.constrained is not None:
                state.constrained.check(state.text.text, known_tokens(state.canvas))
        return outcomes
