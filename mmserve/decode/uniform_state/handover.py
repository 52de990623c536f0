"""Canvases of random tokens as plain data, and back. Shapes as of ``Step``."""

from __future__ import annotations

from mmserve.constraint.restored import session_state
from mmserve.constraint.session.session import Session
from mmserve.core.payloads import CanvasPayload, KVState, PrefilledPayload
from mmserve.decode.text import TextStream
from mmserve.decode.uniform_state.constraint import CanvasConstraint
from mmserve.decode.uniform_state.samplers import Step
from mmserve.decode.uniform_state.state import CanvasDecoding, CanvasPrefilled
from mmserve.models.base import CanvasModel


def payload_of(model: CanvasModel, state: CanvasPrefilled | CanvasDecoding) -> PrefilledPayload | CanvasPayload:
    """A request that goes on in another process; the network's K/V are not in pages (``page_size`` 0)."""
    if isinstance(state, CanvasPrefilled):
        return _prefilled(model, state, state.run, state.run)
    return CanvasPayload(
        _prefilled(model, state, state.read, state.recomputed),
        state.text.state(),
        state.log_probabilities,
        state.forwards,
        step=None if state.step is None else vars(state.step),
        still=state.still,
        record=state.record,
    )


def _prefilled(
    model: CanvasModel, state: CanvasPrefilled | CanvasDecoding, read: int, recomputed: int
) -> PrefilledPayload:
    past = {} if state.past is None else model.network.held(state.past)
    constraint = None if state.constraint is None else session_state(state.constraint.session)
    kv = KVState(read, 0, past)
    return PrefilledPayload(state.canvas, kv, recomputed, constraint=constraint, features=state.features)


def prefilled_of(model: CanvasModel, payload: PrefilledPayload, session: Session | None) -> CanvasPrefilled:
    """The state of a request whose prompt is read; raises ``TransferError`` where its K/V do not fit ``model``."""
    kv = payload.kv
    past = model.network.past_of(kv.tensors, kv.positions) if kv.tensors else None
    constraint = None if session is None else CanvasConstraint(session)
    return CanvasPrefilled(payload.canvas, payload.features, constraint, past, kv.positions)


def go_on(d: CanvasDecoding, payload: CanvasPayload) -> CanvasDecoding:
    """``d``, whose prompt is read, where ``payload`` has it."""
    d.text = TextStream.restored(d.text.tokenizer, d.request.sampling.stop, payload.text)
    d.log_probabilities, d.forwards, d.still = payload.log_probabilities, payload.forwards, payload.still
    d.recomputed, d.record = payload.prefilled.recomputed, payload.record
    d.step = None if payload.step is None else Step(**payload.step)
    return d
