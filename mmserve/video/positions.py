"""Rotary positions of a stream's rows, which must stay within the model's maximum.

With several position axes (M-RoPE), text has the same position on all of them; consecutive visual tokens share a base
position, and are offset from it in time, row and column: see ``mmserve.encode.places``. Times are relative to the
oldest kept frame of such a run. Shapes in names: A axes (0 if positions are single numbers), n rows.
"""

from __future__ import annotations

import numpy as np
import torch

from mmserve.encode.places import axis_places

#: Position rules: ``renumber``: rows are numbered from 0, again after every eviction; ``gaps``: they keep their
#: positions, and evicted rows leave a gap, which is closed when the model's maximum is near; ``reanchor``: as ``gaps``,
#: but near the maximum the kept rows are run again from position 0.
RULES = ("renumber", "gaps", "reanchor")


def laid_out(visual_n: np.ndarray, coordinates_An: np.ndarray) -> np.ndarray:
    """Positions of rows numbered from 0, and of the next row: int64 ``[n + 1]`` or ``[A, n + 1]``.

    ``visual_n`` (bool): which rows are visual tokens; ``coordinates_An`` (int64): time, row and column of each of
    those.
    """
    if not len(coordinates_An):
        return np.arange(len(visual_n) + 1)
    own = coordinates_An[:, visual_n].copy()
    begins = visual_n & ~np.concatenate([[False], visual_n[:-1]])
    own[0] -= coordinates_An[0, begins][np.cumsum(begins)[visual_n] - 1]
    return axis_places(torch.from_numpy(visual_n), torch.from_numpy(own)).numpy()


def continued(
    places: np.ndarray, before: tuple[np.ndarray, np.ndarray], rows: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Positions (int64 ``[n + 1]`` or ``[A, n + 1]``) of new ``rows`` after those at ``places``, and of the next row.

    ``before``, ``rows``: the arguments of ``laid_out`` for the old and the new rows. Visual tokens after visual tokens
    continue in time; other rows begin after the maximum position.
    """
    visual, coordinates = before
    if not visual.size:
        return laid_out(*rows)
    if not len(coordinates):
        return int(places[-1]) + 1 + laid_out(*rows)
    last = len(visual) - int(np.argmin(visual[::-1])) if not visual.all() else 0  # the first row of the last visual run
    if not visual[-1]:
        last = len(visual) - 1  # for text, the last row is enough
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
    """Positions of the rows that are left after an eviction; ``places``: before it, ``numbered``: numbered from 0.

    The first ``first`` rows, sinks and carriers, are numbered from 0 under every rule.
    """
    if rule == "renumber":
        return numbered
    return np.concatenate([numbered[..., :first], places[..., first:]], axis=-1)


def is_full(places: np.ndarray, reserve: int, limit: int) -> bool:
    """Whether rows at ``places``, followed by ``reserve`` positions, exceed ``limit`` positions."""
    return bool(places.size) and int(places.max()) + 1 + reserve > limit
