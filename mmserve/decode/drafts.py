"""Drafts of a canvas for streaming: the positions that a step changed, with their tokens and texts."""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.canvas_record import STATES, CanvasRecord
from mmserve.core.events import Draft
from mmserve.core.request import Streaming
from mmserve.decode.commit import Candidates
from mmserve.decode.state import DecodeState
from mmserve.decode.token_texts import token_texts
from mmserve.models.base import EncoderModel

#: Decimal places of probabilities in drafts, which are for display.
_DIGITS = 4


def record_for(streaming: Streaming, positions: int) -> CanvasRecord | None:
    """The record of candidates of a canvas of ``positions``; None if the request does not stream drafts."""
    return CanvasRecord.nothing(positions, streaming.alternatives) if streaming.records else None


def draft_of(d: DecodeState, model: EncoderModel, canvas: Canvas, candidates: Candidates) -> Draft | None:
    """Record a step that made some of ``candidates`` final. Returns the changes, if the request streams drafts."""
    record = d.record
    if record is None:
        return None
    at = record.take(canvas, candidates, d.log_probabilities, model.spec.end_ids)
    if not d.request.streaming.drafts:
        return None
    found = record.alternatives.where(at)
    log_probabilities = found.log_probabilities
    texts = token_texts(model.tokenizer, np.concatenate([record.tokens[at, None], found.tokens], axis=1))
    states = [STATES[state] for state in record.states[at].tolist()]
    confidence = np.round(record.confidence[at].astype(np.float64), _DIGITS).tolist()
    probabilities = np.round(np.exp(log_probabilities, dtype=np.float64), _DIGITS).tolist()
    alternatives = [
        tuple(zip(ids, own_texts[1:], row, strict=True))
        for ids, own_texts, row in zip(found.tokens.tolist(), texts, probabilities, strict=True)
    ]
    if np.isneginf(log_probabilities).any():
        counts = np.isfinite(log_probabilities).sum(-1).tolist()
        alternatives = [each[:count] for each, count in zip(alternatives, counts, strict=True)]
    own = [each[0] if state != STATES[0] else "" for each, state in zip(texts, states, strict=True)]
    columns = at.tolist(), record.tokens[at].tolist(), own, states, confidence, alternatives
    return Draft(tuple(zip(*columns, strict=True)), len(record.states), d.forwards)
