"""The events of a request after a step: new text, its finish reason, a snapshot of its canvas, and its answer."""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.events import CommittedToken, Snapshot
from mmserve.core.progress import TOKENS_TOGETHER, Step
from mmserve.decode.state import Answer, DecodeState
from mmserve.decode.text import canvas_text, committed_tokens, end_token
from mmserve.models.base import Model


def advanced(d: DecodeState, answer: np.ndarray, complete: bool, budget: int) -> tuple[str, str | None]:
    """New final text of ``answer``, its final tokens so far, and its finish reason, if it ended
    (``TextStream.advance``).

    Empty for branches: their concatenation is not the text of an answer.
    """
    delta, reason = d.text.advance(answer, complete, budget)
    delta = delta if d.canvas.branches is None else ""
    if reason == "length" and any(extension.complete_at_budget for extension in d.extensions):
        reason = "end"
    return delta, reason


def snapshot_of(d: DecodeState, model: Model, canvas: Canvas, edited: int = 0) -> Snapshot:
    """The snapshot of ``canvas``; ``edited``: tokens that this step replaced."""
    committed = int((~d.canvas.masked[canvas.prompt_length : canvas.size]).sum())
    return Snapshot(
        canvas_text(canvas, model.tokenizer, model.spec.end_ids), committed, canvas.new_tokens, d.forwards, edited
    )


def step_of(d: DecodeState, begun: int, committed: int, edited: int = 0) -> Step | None:
    """The effect of a step on the block that begins at position ``begun``; None if the request is not traced."""
    if not d.request.trace:
        return None
    canvas, length = d.canvas, d.canvas.block_length
    length = TOKENS_TOGETHER if length == 1 else length
    number = (begun - canvas.block_of(canvas.prompt_length)) // length
    took = sum(extension.seconds for extension in d.extensions)
    return Step(number, committed, edited, d.forwards, took)


def tokens_of(d: DecodeState, model: Model) -> tuple[CommittedToken, ...]:
    """The answer's committed tokens, up to the end of its text."""
    others = None if d.record is None else d.record.alternatives
    return committed_tokens(
        d.canvas,
        d.text.covered_tokens,
        d.log_probabilities,
        others,
        model.tokenizer,
        model.spec.end_ids,
        within=d.request.keeps_space,
    )


def end_of(d: DecodeState, model: Model) -> CommittedToken | None:
    """The end token after the answer's tokens, if one ended it."""
    if d.text.stopped:
        return None
    others = None if d.record is None else d.record.alternatives
    return end_token(d.canvas, d.text.tokens, d.log_probabilities, others, model.tokenizer, model.spec.end_ids)


def answer_of(d: DecodeState, model: Model) -> Answer:
    """The answer of a request that ended in decode."""
    held = d.held
    if model.spec.causal:  # discard drafted tokens after the answer's end
        evicted = sum(extension.evicted for extension in d.extensions)
        held = min(held, d.canvas.prompt_length + d.text.tokens - evicted)
    tokens = tokens_of(d, model) if d.request.streaming.tokens else ()
    end = end_of(d, model) if d.request.streaming.tokens else None
    counts = d.text.tokens, d.forwards, d.recomputed, d.edits, held
    made = Answer(d.text.text, *counts, tokens, stop=d.text.stop, end_token=end)
    for extension in d.extensions:
        made = extension.report(made, d)
    return made
