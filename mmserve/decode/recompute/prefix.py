"""Fast-dLLM's prefix cache (arXiv 2505.22618; NVlabs/Fast-dLLM, llada/generate.py: generate_with_prefix_cache).

The first pass of a block runs everything; the others run the block and everything right of it, and read the K/V of
positions left of the block from that first pass.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import every_position


class Prefix:
    """Run from the block's start on."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        return every_position(canvas) if canvas.block_step == 0 else np.arange(canvas.block_start, canvas.size)
