"""FreeCache (arXiv 2505.21467): positions left of the current block are never run again.

The first pass runs everything and stores the prompt's K/V; each later one runs from the block's start on. A finished
block keeps the K/V of its last pass, in which tokens committed after it were still masks: one position with one token a
step, the whole block if it is filled in one pass.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import every_position


class FreeCache:
    """Run from the block's start on, a new block's first pass included."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        return every_position(canvas) if canvas.step == 0 else np.arange(canvas.block_start, canvas.size)
