"""FreeCache (arXiv 2505.21467): what is left of the block is never run again.

The very first pass runs everything and keeps the prompt's K/V; each later one runs from the block's start on. A
finished block keeps the K/V of its last pass, in which the tokens committed after it were masks: with one token a step
that is one position, with a block filled in one pass all of it.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import every_position


class FreeCache:
    """Run from the block's start on, a new block's first pass included."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        return every_position(canvas) if canvas.step == 0 else np.arange(canvas.block_start, canvas.size)
