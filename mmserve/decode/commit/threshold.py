"""Fast-dLLM's parallel commit by confidence (arXiv 2505.22618; NVlabs/Fast-dLLM, llada/generate.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import Candidates, most_confident


@dataclass(frozen=True)
class Threshold:
    """Every candidate of probability at least ``confidence`` (``>=``, as in Fast-dLLM), and always the best one."""

    confidence: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.confidence <= 1:
            raise ValueError("confidence must be in (0, 1]")

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return (candidates.confidence >= self.confidence) | most_confident(candidates, 1)
