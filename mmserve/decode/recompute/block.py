"""Block diffusion (SDAR, arXiv 2510.06303; JetAstra/SDAR, generate.py): the current block, and the last one once more.

Where a position sees to the end of its own block and no further, its key and value depend on that block and those
before it. They are final once a pass has seen the finished block, and change within a block with each token of it.
SDAR makes that last pass over a block by itself, to store it; here it is part of the next block's first pass. Where the
row before a position predicts it (Fast-dLLM v2, arXiv 2509.26328), that pass predicts the next block's first token.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import changed_blocks


class Block:
    """Run from the first block in which a token became known at the latest step to the end of the current block.

    Blocks here are those that bound what a position sees.
    """

    def rows(self, canvas: Canvas) -> np.ndarray:
        return changed_blocks(canvas)
