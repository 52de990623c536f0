"""Block diffusion (SDAR, arXiv 2510.06303; JetAstra/SDAR, generate.py): the current block, and the last one once more.

With block-causal attention, a position's key and value depend only on its block and those before it. They are final
after a pass over the finished block, and change with each token committed in the block. SDAR runs a separate pass over
a finished block to store its K/V; here it is part of the next block's first pass. If a row predicts the position to its
right (Fast-dLLM v2, arXiv 2509.26328), that pass predicts the next block's first token.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import changed_blocks


class Block:
    """Run from the first block with a token committed in the latest step to the end of the current block.

    Blocks here are those of block-causal attention.
    """

    def rows(self, canvas: Canvas) -> np.ndarray:
        return changed_blocks(canvas)
