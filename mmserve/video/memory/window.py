"""The chat's header and the newest frames (attention sinks and a window, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.video.memory.base import Retained, Rows, every_row, whole_frames, without


@dataclass(frozen=True)
class Window:
    """Evicts the oldest frames, completely and several at once."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        return every_row(frame_nD)

    def retain(self, rows: Rows, most: int) -> Retained:
        return Retained(without(rows, whole_frames(rows, most)))
