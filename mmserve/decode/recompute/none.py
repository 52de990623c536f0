"""No cache: every position in every step; the baseline for other policies."""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.recompute.base import every_position


class NoCache:
    """Run everything."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        return every_position(canvas)
