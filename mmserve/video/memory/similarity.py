"""Efficient Video Sampling (arXiv 2510.14624): drops visual tokens that changed little since the previous frame.

A dropped token is represented by that of an earlier frame, as long as that is kept: so every ``every``-th frame is
complete, and frames are evicted up to the next complete one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.video.memory.base import CHUNK, Retained, Rows, every_row, whole_frames, without


@dataclass(frozen=True)
class Similarity:
    """A token is kept if its cosine similarity to the token at the same position of the previous frame is below
    ``alike``; of each frame, at least the one that changed most is kept."""

    alike: float = 0.9
    every: int = CHUNK
    needs: ClassVar[frozenset[str]] = frozenset()

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        if before_nD is None or number % self.every == 0:
            return every_row(frame_nD)
        norms = np.linalg.norm(before_nD, axis=1) * np.linalg.norm(frame_nD, axis=1)
        cosine = (before_nD * frame_nD).sum(1) / np.maximum(norms, 1e-6)
        kept: np.ndarray = cosine < self.alike
        kept[int(cosine.argmin())] = True
        return kept

    def retain(self, rows: Rows, most: int) -> Retained:
        evicted = whole_frames(rows, most, chunk=self.every)
        rest = np.setdiff1d(rows.frames, evicted)
        whole = rest[rest % self.every == 0]
        if len(whole):  # frames before it depend on evicted ones
            evicted = np.concatenate([evicted, rest[rest < whole[0]]])
        return Retained(without(rows, evicted))
