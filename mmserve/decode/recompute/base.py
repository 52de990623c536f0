"""Recompute policies: which positions each step runs through the model; all others are read from the K/V store."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mmserve.core.canvas import Canvas


class Recompute(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        """Positions (int64, ascending) to run in the next forward pass; every masked one of the block is among them."""
        ...


def every_position(canvas: Canvas) -> np.ndarray:
    """All positions of the canvas."""
    return np.arange(canvas.size)
