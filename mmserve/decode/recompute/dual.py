"""Fast-dLLM's dual cache (arXiv 2505.22618; NVlabs/Fast-dLLM, llada/generate.py: generate_with_dual_cache).

The first pass of a block runs everything; the others run only the block, with the K/V of both sides from that first
pass. In block diffusion, where everything means one attention block, this is Fast-dLLM v2's sub-block cache (arXiv
2509.26328; ``use_block_cache`` of its ``generate``).
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import changed_blocks, every_position


class Dual:
    """Run the block."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        if not canvas.attention_block:
            return every_position(canvas) if canvas.block_step == 0 else np.arange(canvas.block_start, canvas.block_end)
        first = canvas.block_of(canvas.block_start)
        return changed_blocks(canvas) if self._needs_others(canvas, first) else np.arange(first, canvas.block_end)

    def _needs_others(self, canvas: Canvas, first: int) -> bool:
        """Whether the block has not run since the previous block was filled, or its ``first`` position is still open
        and is predicted by that block."""
        if canvas.block_step == 0:
            return True
        begun = first == canvas.attention_block_start(first) and canvas.committed_at[first] == canvas.step
        return bool(canvas.logit_shift) and (begun or bool(canvas.masked[first]))
