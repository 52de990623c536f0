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
    """All candidates more probable than ``confidence``; where there is none, as many as reach the next point of the
    schedule's time grid.

    Judged on untempered probabilities, and for each request by itself (the reference decides for a batch as a whole).
    The last step takes what is left, so that a block never takes more passes than the schedule gives it. The grid ends
    at 0 masked positions; the reference's ends at ``eps`` (1e-3), which commits its last two tokens in one step where a
    step is a token. The reference has no blocks: one block as long as the canvas is its schedule.
    """

    steps: int = 0

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        sure, done = candidates.confidence > self.confidence, canvas.block_step - 1
        if sure.any() and done < steps_of_block(canvas, self.steps or canvas.new_tokens) - 1:
            return sure
        return most_confident(candidates, tokens_to_grid(canvas, self.steps, done))
