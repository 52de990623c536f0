"""The state of each position of an answer after a step, for drafts and for the candidates of final tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from mmserve.core.candidates import Alternatives, Candidates
from mmserve.core.canvas import GIVEN, MASKED, Canvas, among

#: Names of the states of a position (``DraftPosition.state``), indexed by the numbers in ``CanvasRecord.states``.
STATES = ("masked", "draft", "committed", "edited", "pinned")
_MASKED, _DRAFT, _COMMITTED, _EDITED, _PINNED = range(len(STATES))
#: A probability is sent again when it differs from the one last sent by at least this. A change among less probable
#: alternatives is not sent.
RESOLUTION = 5e-3


@dataclass(eq=False)
class CanvasRecord:
    """The first ``L`` positions of an answer after the latest step."""

    states: np.ndarray  # uint8 [L]
    tokens: np.ndarray  # int64 [L], 0 where masked
    confidence: np.ndarray  # float32 [L], as last sent; 0 where masked
    alternatives: Alternatives  # [L, k]
    sent_alternatives: Alternatives  # [L, k], as last sent
    sent: bool = False  # a draft has shown all positions

    @classmethod
    def nothing(cls, positions: int, alternatives: int) -> CanvasRecord:
        """The record before the first step, with ``alternatives`` alternatives for each position."""
        states, tokens = np.zeros(positions, np.uint8), np.zeros(positions, np.int64)
        found, sent = (Alternatives.none(positions, alternatives) for _ in range(2))
        return cls(states, tokens, np.zeros(positions, np.float32), found, sent)

    def take(
        self, canvas: Canvas, candidates: Candidates, log_probabilities: np.ndarray, end_ids: Collection[int]
    ) -> np.ndarray:
        """Record a step that made some of ``candidates`` final; ``canvas`` is the canvas after that step.

        ``log_probabilities``: float32 ``[N]``, of the final tokens. Returns the positions (int64, ascending) that
        changed; the first time, all of them.
        """
        before = self.states.copy(), self.tokens.copy(), self.confidence.copy()
        answer = slice(canvas.prompt_length, canvas.prompt_length + len(self.states))
        committed_at, tokens = canvas.committed_at[answer], canvas.tokens[answer]
        self._take_candidates(canvas, candidates, committed_at)
        final = committed_at != MASKED
        self.tokens[final] = tokens[final]
        self.confidence[final] = np.exp(log_probabilities[answer][final])
        replaced = (before[0] == _COMMITTED) & (before[1] != self.tokens) | (before[0] == _EDITED)
        pinned = (committed_at == GIVEN) & ~among(tokens, end_ids)
        self.states[final] = np.where(pinned, _PINNED, np.where(replaced, _EDITED, _COMMITTED))[final]
        changed = (self.states != before[0]) | (self.tokens != before[1])
        changed |= np.abs(self.confidence - before[2]) >= RESOLUTION
        changed |= _differ(self.alternatives, self.sent_alternatives)
        if not self.sent:
            changed[:], self.sent = True, True
        self.confidence[~changed] = before[2][~changed]  # as last sent, so that small changes add up
        self.sent_alternatives.tokens[changed] = self.alternatives.tokens[changed]
        self.sent_alternatives.log_probabilities[changed] = self.alternatives.log_probabilities[changed]
        return np.flatnonzero(changed)

    def _take_candidates(self, canvas: Canvas, candidates: Candidates, committed_at: np.ndarray) -> None:
        """Record the candidates of open positions, and the alternatives of those that this step made final."""
        at = candidates.positions - canvas.prompt_length
        inside = np.flatnonzero((at >= 0) & (at < len(self.states)))
        at = at[inside]
        new = (committed_at[at] == MASKED) | (committed_at[at] == canvas.step)
        at, inside = at[new], inside[new]
        self.states[at], self.tokens[at] = _DRAFT, candidates.tokens[inside]
        self.confidence[at] = candidates.confidence[inside]
        if candidates.alternatives is not None:
            self.alternatives.tokens[at] = candidates.alternatives.tokens[inside]
            self.alternatives.log_probabilities[at] = candidates.alternatives.log_probabilities[inside]


def _differ(now: Alternatives, sent: Alternatives) -> np.ndarray:
    """Bool ``[L]``: whether tokens or probabilities of the alternatives of a position differ enough to be sent."""
    ids, probabilities = _likely(now)
    sent_ids, sent_probabilities = _likely(sent)
    return ((ids != sent_ids) | (np.abs(probabilities - sent_probabilities) >= RESOLUTION)).any(-1)


def _likely(found: Alternatives) -> tuple[np.ndarray, np.ndarray]:
    """Ids and probabilities, each ``[L, k]``; -1 and 0 for alternatives below the resolution."""
    probabilities = np.exp(found.log_probabilities)
    likely = probabilities >= RESOLUTION
    return np.where(likely, found.tokens, -1), np.where(likely, probabilities, 0)
