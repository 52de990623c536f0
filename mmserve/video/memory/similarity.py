"""Efficient Video Sampling (arXiv 2510.14624): visual tokens that changed little since the frame before are dropped.

What is dropped is still to be seen in an earlier frame, as long as that is kept: so every ``every``-th frame is whole,
and frames are evicted up to the next whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.video.memory.base import CHUNK, Left, Rows, every_row, whole_frames, without


@dataclass(frozen=True)
class Similarity:
    """A token stays if its cosine similarity to the one at its place in the frame before is below ``alike``; of a frame
    at least the one that changed most."""

    alike: float = 0.9
    every: int = CHUNK
    needs: ClassVar[frozenset[str]] = frozenset()

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        if before_nD is None or number % self.every == 0:
            return every_row(frame_nD)
        norms = np.linalg.norm(before_nD, axis=1) * np.linalg.norm(frame_nD, axis=1)
        cosine = (before_nD * frame_nD).sum(1) / np.maximum(norms, 1e-6)
        stay: np.ndarray = cosine < self.alike
        stay[int(cosine.argmin())] = True
        return stay

    def left(self, rows: Rows, most: int) -> Left:
        gone = whole_frames(rows, most, chunk=self.every)
        rest = np.setdiff1d(rows.frames, gone)
        whole = rest[rest % self.every == 0]
        if len(whole):  # the frames before it refer to what was dropped
            gone = np.concatenate([gone, rest[rest < whole[0]]])
        return Left(without(rows, gone))
