"""How far right the positions of a prompt see whose images are seen whole, as Gemma 3's are (arXiv 2503.19786)."""

from __future__ import annotations

import numpy as np


def image_sight(ids: np.ndarray, image_id: int) -> np.ndarray:
    """Int64 ``[N]``: how many of the first positions each of ``ids`` (int64 ``[N]``) sees.

    A visual token sees up to the last of its run of visual tokens, any other token up to itself.
    """
    visual = ids == image_id
    seen = np.arange(1, len(ids) + 1)
    if visual.any():
        ends = np.flatnonzero(visual & ~np.append(visual[1:], False)) + 1
        seen[visual] = ends[np.searchsorted(ends, np.flatnonzero(visual), side="right")]
    return seen
