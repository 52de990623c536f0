"""dKV-Cache-Greedy (arXiv 2505.15781; horseee/dKV-Cache, generation_utils/llada_dkv_cache_greedy.py).

The order in which a block's positions are decoded is drawn once. A step runs the positions that are next in that order,
those decoded in the previous step, and a few masked neighbours of each; all others are read from the cache. The first
step of a block and every ``refresh``-th run everything. Intended for the commit policy ``random``, which uses the same
order; any other policy chooses among the positions that were run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import recompute as numbers
from mmserve.core.values import Checked
from mmserve.decode.pace import next_in_order, random_order, tokens_of_step
from mmserve.decode.recompute.base import every_position


@dataclass(frozen=True)
class DkvGreedy(numbers.DkvGreedy, Checked):
    """``refresh``: steps between full passes (2 in the paper's repository); ``window``: neighbours of each (4 there).

    ``steps`` and ``seed`` are the request's: they determine the schedule and the order.
    """

    steps: int = 0
    seed: int = 0

    def rows(self, canvas: Canvas) -> np.ndarray:
        if canvas.block_step % self.refresh == 0:
            return every_position(canvas)
        count = tokens_of_step(canvas, self.steps, canvas.block_step)
        now = next_in_order(canvas, random_order(canvas, self.seed), count)
        chosen = (canvas.committed_at == canvas.step) & ~canvas.masked
        chosen[now] = True
        masked = canvas.masked
        for position in now:
            _mark_neighbours(chosen, masked, int(position), self.window)
        return np.flatnonzero(chosen)


def _mark_neighbours(chosen: np.ndarray, masked: np.ndarray, position: int, window: int) -> None:
    """Mark ``window`` unmarked masked positions around ``position``, alternating between left and right."""
    left, right, found, leftwards = position - 1, position + 1, 0, True
    while found < window and (left >= 0 or right < len(chosen)):
        at = left if leftwards else right
        if 0 <= at < len(chosen) and masked[at] and not chosen[at]:
            chosen[at] = True
            found += 1
        left, right, leftwards = (left - 1, right, False) if leftwards else (left, right + 1, True)
