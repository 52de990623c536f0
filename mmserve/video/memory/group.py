"""QuickVideo's rule (arXiv 2505.16175): in a group of frames, the rows with the smallest L2 norms of keys are kept.

They receive the most attention (arXiv 2406.11430). The paper prunes each layer separately; here all layers have the
same rows, and norms are averaged over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.video.memory.base import CHUNK, Kind, Retained, Rows, every_row, whole_frames, without


@dataclass(frozen=True)
class Group:
    """In every group of ``size`` frames except for the newest, ``share`` of the visual rows are kept when space is
    needed; then the oldest frames are evicted."""

    size: int = CHUNK
    share: float = 0.25
    needs: ClassVar[frozenset[str]] = frozenset({"norms"})

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        return every_row(frame_nD)

    def retain(self, rows: Rows, most: int) -> Retained:
        assert rows.norms is not None
        keep = np.arange(len(rows))
        for group in self._groups(rows):
            if len(keep) <= most:
                break
            keep = np.setdiff1d(keep, self._dropped(rows, group))
        if len(keep) > most:
            remaining = Rows(rows.kind[keep], rows.frame[keep])
            keep = keep[without(remaining, whole_frames(remaining, most))]
        return Retained(keep)

    def _groups(self, rows: Rows) -> list[np.ndarray]:
        """Frames (int64) of each group that has not been pruned, oldest first; never the newest ``size`` frames."""
        frames = rows.frames
        old = frames[: max(0, len(frames) - self.size)]
        groups = [old[old // self.size == g] for g in np.unique(old // self.size)]
        visual = rows.kind == Kind.VISUAL
        most = max(np.count_nonzero(visual & (rows.frame == f)) for f in frames)
        return [g for g in groups if np.count_nonzero(visual & np.isin(rows.frame, g)) > self.share * most * len(g) + 1]

    def _dropped(self, rows: Rows, group: np.ndarray) -> np.ndarray:
        """Rows (int64) of ``group`` to drop: visual ones with large norms, and labels of frames without visual rows
        left."""
        assert rows.norms is not None
        own = np.isin(rows.frame, group) & (rows.kind >= Kind.LABEL)
        visual = np.flatnonzero(own & (rows.kind == Kind.VISUAL))
        count = int(np.ceil(self.share * len(visual)))
        kept = visual[np.argsort(rows.norms[visual], kind="stable")[:count]]
        emptied = own & ~np.isin(rows.frame, rows.frame[kept])
        return np.union1d(np.setdiff1d(visual, kept), np.flatnonzero(emptied))
