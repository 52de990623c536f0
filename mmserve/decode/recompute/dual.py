"""Fast-dLLM's dual cache (arXiv 2505.22618; NVlabs/Fast-dLLM, llada/generate.py: generate_with_dual_cache).

The first pass of a block runs everything; the others run the block alone, between K/V of both sides as that first pass
left it.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import every_position


class Dual:
    """Run the block."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        return every_position(canvas) if canvas.block_step == 0 else np.arange(canvas.block_start, canvas.block_end)
