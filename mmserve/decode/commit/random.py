"""Random remasking (ML-GSAI/LLaDA, generate.py): the schedule's number of tokens, at positions drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import BlockWise, Candidates
from mmserve.decode.pace import next_in_order, random_order, tokens_of_step


@dataclass(frozen=True)
class Random(BlockWise):
    """The order is drawn once for each block from the request's ``seed``, as in dKV-Cache-Greedy."""

    steps: int = 0
    seed: int = 0

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        count = tokens_of_step(canvas, self.steps, canvas.block_step - 1)
        order = random_order(canvas, self.seed)
        order = order[np.isin(order, candidates.positions)]  # a pass may have candidates for only part of the block
        return np.isin(candidates.positions, next_in_order(canvas, order, count))
