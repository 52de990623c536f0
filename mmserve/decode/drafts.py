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
    kept = d.record
    if kept is None:
        return None
    at = kept.take(canvas, candidates, d.log_probabilities, model.spec.end_ids)
    if not d.request.streaming.drafts:
        return None
    found = kept.alternatives.where(at)
    likely = found.log_probabilities
    texts = token_texts(model.tokenizer, np.concatenate([kept.tokens[at, None], found.tokens], axis=1))
    states = [STATES[state] for state in kept.states[at].tolist()]
    sure = np.round(kept.confidence[at].astype(np.float64), _DIGITS).tolist()
    shares = np.round(np.exp(likely, dtype=np.float64), _DIGITS).tolist()
    alternatives = [
        tuple(zip(ids, words[1:], row, strict=True))
        for ids, words, row in zip(found.tokens.tolist(), texts, shares, strict=True)
    ]
    if np.isneginf(likely).any():
        counts = np.isfinite(likely).sum(-1).tolist()
        alternatives = [each[:count] for each, count in zip(alternatives, counts, strict=True)]
    own = [words[0] if state != STATES[0] else "" for words, state in zip(texts, states, strict=True)]
    columns = at.tolist(), kept.tokens[at].tolist(), own, states, sure, alternatives
    return Draft(tuple(zip(*columns, strict=True)), len(kept.states), d.forwards)
