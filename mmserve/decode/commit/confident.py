"""Dimple's confident decoding (arXiv 2505.16990; yu-rp/Dimple)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import BlockWise, Candidates, most_confident
from mmserve.decode.pace import tokens_of_step


@dataclass(frozen=True)
class Confident(BlockWise):
    """All candidates more probable than ``confidence``; where there is none, as many as the schedule says.

    Judged on untempered probabilities, and for each request by itself (the reference decides for a batch as a whole).
    The schedule's last step takes what is left, so that a block never takes more passes than the schedule gives it.
    """

    confidence: float = 0.95
    steps: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.confidence <= 1:
            raise ValueError("confidence must be in (0, 1]")

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        sure = candidates.confidence > self.confidence
        count = tokens_of_step(canvas, self.steps, canvas.block_step - 1)
        if sure.any() and count < len(sure):
            return sure
        return most_confident(candidates, count)
