"""Dimple's confident decoding (arXiv 2505.16990; yu-rp/Dimple)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import BlockWise, Candidates, most_confident
from mmserve.decode.pace import steps_of_block, tokens_to_grid


@dataclass(frozen=True)
class Confident(numbers.Confident, BlockWise):
    """Commits all candidates with probability above ``confidence``; if there are none, as many as reach the next point
    of the schedule's time grid.

    Uses untempered probabilities, and decides for each request separately (the reference decides for a whole batch).
    The last step commits all that is left, so that a block never takes more passes than its schedule. The grid ends at
    0 masked positions; the reference's ends at ``eps`` (1e-3), so that with one token a step its last two tokens are
    committed in one step. The reference has no blocks: its schedule is that of one block as long as the canvas.
    """

    steps: int = 0

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        sure, done = candidates.confidence > self.confidence, canvas.block_step - 1
        if sure.any() and done < steps_of_block(canvas, self.steps or canvas.new_tokens) - 1:
            return sure
        return most_confident(candidates, tokens_to_grid(canvas, self.steps, done))
