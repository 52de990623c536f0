"""LLaDA's low-confidence remasking (arXiv 2502.09992; ML-GSAI/LLaDA, generate.py): the baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import Candidates, most_confident


@dataclass(frozen=True)
class LowConfidence:
    """Spread the block's tokens evenly over its steps, the remainder over the first; take the most confident.

    ``steps``: denoising steps for the whole canvas; 0 = one token a step. Blocks share them by length.
    """

    steps: int = 0

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return most_confident(candidates, self._count(canvas))

    def _count(self, canvas: Canvas) -> int:
        length = canvas.block_end - canvas.block_start
        steps = self._block_steps(canvas)
        done = canvas.block_step - 1
        if done >= steps - 1:
            return length  # the last step takes what is left
        return length // steps + (done < length % steps)

    def _block_steps(self, canvas: Canvas) -> int:
        total = self.steps or canvas.new_tokens
        left, right = (p - canvas.prompt_length for p in (canvas.block_start, canvas.block_end))
        share = total * right // canvas.new_tokens - total * left // canvas.new_tokens
        return min(max(1, share), right - left)
