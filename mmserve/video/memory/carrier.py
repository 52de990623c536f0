"""VideoScan (arXiv 2503.09387): an evicted frame is replaced by one carrier, and similar carriers are merged.

A carrier is the mean of its frame's visual tokens, run after the header and the previous carriers. At the limit, of the
most similar pair of adjacent carriers the earlier one is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from mmserve.video.memory.base import Kind, Retained, Rows, every_row, whole_frames, without


@dataclass(frozen=True)
class Carrier:
    """``carriers``: maximum number of carriers, and never more than half of the kept rows."""

    carriers: int = 64
    needs: ClassVar[frozenset[str]] = frozenset({"features"})

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        return every_row(frame_nD)

    def retain(self, rows: Rows, most: int) -> Retained:
        assert rows.features is not None
        sinks = int(np.count_nonzero(rows.kind == Kind.SINK))
        bound = min(self.carriers, max(0, most - sinks) // 2)
        old = np.flatnonzero(rows.kind == Kind.CARRIER)
        added = np.minimum(bound, len(old) + np.arange(1, len(rows.frames) + 1)) - len(old)
        evicted = whole_frames(rows, most, added=added)
        means = [rows.features[(rows.frame == f) & (rows.kind == Kind.VISUAL)].mean(0) for f in evicted]
        kept = merged(np.stack([*rows.features[old], *means]), bound)
        keep = np.setdiff1d(without(rows, evicted), old[~kept[: len(old)]])
        return Retained(keep, evicted[kept[len(old) :]])


def merged(tokens_nD: np.ndarray, most: int) -> np.ndarray:
    """Bool ``[n]``: the carriers that are kept, at most ``most``; of the most similar adjacent pair the earlier is
    dropped."""
    unit = tokens_nD / np.maximum(np.linalg.norm(tokens_nD, axis=1, keepdims=True), 1e-6)
    left = list(range(len(unit)))
    while len(left) > most:
        alike = [float(unit[a] @ unit[b]) for a, b in pairwise(left)]
        left.pop(int(np.argmax(alike)) if alike else 0)
    kept = np.zeros(len(unit), dtype=bool)
    kept[left] = True
    return kept
