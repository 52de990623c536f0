"""Speculation with a draft model, for next-token models (arXiv 2211.17192, arXiv 2302.01318).

A companion drafts a few tokens, one pass of the model runs them all, and those that it would have chosen itself are
kept. Greedy, the answer is the one without a draft, in fewer passes, but for ties in the last bits of logits, as with
``ngram``. Drawn, each token is still the model's own draw:
the papers accept a draft at random so that the distribution is kept; here model and companion draw with the same noise,
which keeps the distribution too and makes them agree more often than two draws would (arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import Candidates, Undrafted, leading


@dataclass(frozen=True)
class DraftModel(numbers.DraftModel, Undrafted):
    """``length``: tokens of a draft."""

    @property
    def whole_canvas(self) -> bool:
        """A draft reaches past the block of one token."""
        return True

    def wanted(self, canvas: Canvas) -> int:
        return min(self.length, canvas.size - canvas.known() - 1)  # one more follows the last drafted token

    def agreed(self, canvas: Canvas, candidates: Candidates, drafted: np.ndarray) -> Candidates:
        drafted = drafted[: len(candidates.positions) - 1]
        kept = leading(candidates.tokens[: len(drafted)] == drafted)
        return candidates.where(np.arange(len(candidates.positions)) <= kept)

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return np.ones(len(candidates.positions), dtype=bool)
