"""Next-token decoding: run only tokens committed since the last pass; the K/V of everything before is exact."""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import MASKED, Canvas


class Last:
    """Run the tokens committed at the latest step."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        return np.flatnonzero((canvas.committed_at >= canvas.step) & (canvas.committed_at != MASKED))
