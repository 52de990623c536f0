"""LLaDA's low-confidence remasking (arXiv 2502.09992; ML-GSAI/LLaDA, generate.py): the baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import BlockWise, Candidates, most_confident
from mmserve.decode.pace import tokens_of_step


@dataclass(frozen=True)
class LowConfidence(BlockWise):
    """Distributes the block's tokens evenly over its steps, the remainder over the first ones; commits the most
    confident.

    ``steps``: denoising steps for the whole canvas, shared among blocks by length; 0 = one token a step.
    """

    steps: int = 0

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return most_confident(candidates, tokens_of_step(canvas, self.steps, canvas.block_step - 1))
