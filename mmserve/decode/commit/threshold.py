"""Fast-dLLM's parallel commit by confidence (arXiv 2505.22618; NVlabs/Fast-dLLM, llada/generate.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import BlockWise, Candidates, most_confident


@dataclass(frozen=True)
class Threshold(numbers.Threshold, BlockWise):
    """Commits every candidate of probability at least ``confidence`` (``>=``, as in Fast-dLLM), and always the best
    one.

    Above 1, only the best one is committed: one token a step.
    """

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        least = np.float32(min(self.confidence, 2.0))
        return (candidates.confidence >= least) | most_confident(candidates, 1)
