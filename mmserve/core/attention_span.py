"""How far each prompt position attends with bidirectional attention within images, as in Gemma 3 (arXiv 2503.19786)."""

from __future__ import annotations

import numpy as np


def image_spans(ids: np.ndarray, image_id: int) -> np.ndarray:
    """Int64 ``[N]``: the number of leading positions that each of ``ids`` (int64 ``[N]``) attends to.

    A visual token attends up to the end of its run of visual tokens, any other token up to itself.
    """
    visual = ids == image_id
    limits = np.arange(1, len(ids) + 1)
    if visual.any():
        ends = np.flatnonzero(visual & ~np.append(visual[1:], False)) + 1
        limits[visual] = ends[np.searchsorted(ends, np.flatnonzero(visual), side="right")]
    return limits
