"""dKV-Cache-Decode (arXiv 2505.15781; horseee/dKV-Cache, generation_utils/llada_dkv_cache_decode.py and
dream_generation_utils.py).

A token's key and value are cached one step after it was decoded, because right after decoding they still change much.
With T_i the positions known after step i of a block, step i runs the positions outside T_(i-2), which are the masked
ones and those decoded at step i-1, and reads the rest from the cache. Every ``refresh``-th step runs everything,
including the first of a block, so ``refresh`` 1 is equivalent to no cache. If a row predicts its own position (LLaDA),
step 1 of a block also runs everything. If it predicts the position to its right (Dream, ``shift_type="un_right"``),
position j is in T_i when j and j+1 are both known, and step 1 already reads the prompt from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import recompute as numbers
from mmserve.core.values import Checked
from mmserve.decode.recompute.base import every_position


@dataclass(frozen=True)
class DkvDecode(numbers.DkvDecode, Checked):
    """``refresh``: steps between full passes (the paper's R, 8)."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        if canvas.block_step % self.refresh == 0 or (canvas.block_step == 1 and not canvas.logit_shift):
            return every_position(canvas)
        # After `step` forward passes, numbered 1 … step, the latest decoded tokens have that number.
        fresh = canvas.committed_at >= canvas.step
        if canvas.logit_shift and canvas.size > 1:
            right = np.append(fresh[1:], fresh[-2])  # the last position has no right neighbour: use its left one
            fresh = fresh | right
        return np.flatnonzero(fresh)
