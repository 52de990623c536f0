"""Positions of a stream's rows for the rotary embedding, which a model knows up to a limit only.

Where positions have several axes (M-RoPE), rows of text are at one place on all of them, and visual tokens without
text between them share the place where they begin, and lie from there in time, by rows and by columns: see
``mmserve.encode.places``. Times are counted from the oldest frame that is kept of such a run. Shapes in names: A axes,
0 of them where a position is one number; n rows.
"""

from __future__ import annotations

import numpy as np
import torch

from mmserve.encode.places import axis_places

#: How positions go on: ``renumber``: rows are numbered from 0, again after every eviction; ``gaps``: they stay
#: where they are, and evicted rows leave a gap, until the model's limit comes near: then it is closed; ``reanchor``:
#: as ``gaps``, but near the limit the rows that are kept are run again from 0.
RULES = ("renumber", "gaps", "reanchor")


def laid_out(visual_n: np.ndarray, coordinates_An: np.ndarray) -> np.ndarray:
    """Places of rows that are numbered from 0, and of what follows them: int64 ``[n + 1]`` or ``[A, n + 1]``.

    ``visual_n`` (bool): which are visual tokens; ``coordinates_An`` (int64): time, row and column of each of those.
    """
    if not len(coordinates_An):
        return np.arange(len(visual_n) + 1)
    own = coordinates_An[:, visual_n].copy()
    begins = visual_n & ~np.concatenate([[False], visual_n[:-1]])
    own[0] -= coordinates_An[0, begins][np.cumsum(begins)[visual_n] - 1]
    return axis_places(torch.from_numpy(visual_n), torch.from_numpy(own)).numpy()


def going_on(
    places: np.ndarray, before: tuple[np.ndarray, np.ndarray], rows: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Places (int64 ``[n + 1]`` or ``[A, n + 1]``) of new ``rows`` after those at ``places``, and of what follows.

    ``before``, ``rows``: of the old and of the new rows what ``laid_out`` takes. Visual tokens after visual tokens go
    on in time; whatever else comes begins after the last row and column.
    """
    visual, coordinates = before
    if not visual.size:
        return laid_out(*rows)
    if not len(coordinates):
        return int(places[-1]) + 1 + laid_out(*rows)
    last = len(visual) - int(np.argmin(visual[::-1])) if not visual.all() else 0  # the first row of the last run
    if not visual[-1]:
        last = len(visual) - 1  # of text, one row is enough
    together = laid_out(
        np.concatenate([visual[last:], rows[0]]), np.concatenate([coordinates[:, last:], rows[1]], axis=1)
    )
    held = len(visual) - last
    moved = places[:, -1] - together[:, held - 1]
    found: np.ndarray = together[:, held:] + moved[1]
    if visual[-1]:
        run = int(np.argmin(np.append(rows[0], False)))  # new rows of the same run
        found[0, :run] += moved[0] - moved[1]
    return found


def after_eviction(rule: str, places: np.ndarray, numbered: np.ndarray, first: int) -> np.ndarray:
    """Places of the rows that are left of a stream, ``places`` before; ``numbered``: theirs if counted from 0.

    The first ``first`` rows, sinks and carriers, are numbered from 0 under every rule.
    """
    if rule == "renumber":
        return numbered
    return np.concatenate([numbered[..., :first], places[..., first:]], axis=-1)


def is_full(places: np.ndarray, reserve: int, limit: int) -> bool:
    """Whether rows at ``places``, and ``reserve`` positions after them, would pass ``limit`` positions."""
    return bool(places.size) and int(places.max()) + 1 + reserve > limit
