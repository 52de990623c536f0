"""Speculation with a draft model, for next-token models (arXiv 2211.17192, arXiv 2302.01318).

A draft model drafts a few tokens, one pass of the served model verifies them all, and the tokens that it would have
chosen itself are kept. If greedy, the answer equals the one without a draft, except for ties in the last bits of logits
(as with ``ngram``). If sampled, each token is still drawn from the served model's distribution: the papers use
rejection sampling to keep the distribution; here both models draw with the same Gumbel noise, which also keeps it and
makes them agree more often than independent draws would (arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import Candidates, CommitDefaults, leading


@dataclass(frozen=True)
class DraftModel(numbers.DraftModel, CommitDefaults):
    """``length``: number of drafted tokens."""

    @property
    def whole_canvas(self) -> bool:
        """True: a draft extends past the current block of one token."""
        return True

    def wanted(self, canvas: Canvas) -> int:
        return min(self.length, canvas.size - canvas.known() - 1)  # one more follows the last drafted token

    def agreed(self, canvas: Canvas, candidates: Candidates, drafted: np.ndarray) -> Candidates:
        drafted = drafted[: len(candidates.positions) - 1]
        kept = leading(candidates.tokens[: len(drafted)] == drafted)
        return candidates.where(np.arange(len(candidates.positions)) <= kept)

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return np.ones(len(candidates.positions), dtype=bool)
