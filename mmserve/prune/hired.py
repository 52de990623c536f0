"""HiRED (arXiv 2408.10945): the first layer's class token sets the number of tokens of each tile, a later layer's ranks
them.

Budgets are computed and rounded as in hasanar1f/HiRED (``HiRED_token_selection`` and ``HiRED_sub_img_budgets`` of its
LLaVA-NeXT). One difference: a tile's share is computed from the patches of the whole view that show the same part of
the picture, as in the paper; the code divides the view's patches in row order into runs of equal length. The frames of
a clip, which the paper does not cover, share the amount in proportion to their class attention on patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Part, Plan, best, highest, on_cpu

#: The code's ``alpha``: maximum share of the amount for the whole view of an image in tiles. The best ``1 - WHOLE``
#: patches in the first layer determine the tiles' shares of the rest.
WHOLE = 0.5


@dataclass(frozen=True)
class Hired:
    """Scores within a grid: the class token's attention in the layer that computes the features.

    Numbers of patches are rounded down, as are the tiles' shares of the rest: fewer tokens than the amount may be kept
    for an image in tiles.
    """

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.FIRST_CLS_ROW})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        sizes = [view.size for view in views]
        wanted = amount.value if amount.name == "token_budget" else sum(sizes) * amount.value
        total = min(sum(sizes), max(1, int(wanted)))
        at = next((i for i, view in enumerate(views) if view.part is None), 0)  # the whole view, if there are tiles
        parts = [view.part for view in views if view.part is not None]
        first = on_cpu([view[Evidence.FIRST_CLS_ROW] for view in (views[at : at + 1] if parts else views)])
        if parts:
            others = sizes[:at] + sizes[at + 1 :]
            whole = min(max(1, int(total * WHOLE)), sizes[at])
            kept = tile_budgets(content(views[at], first[0], parts), others, total - whole)
            kept.insert(at, whole)
        else:
            shares = [float(row.sum(dtype=np.float64)) for row in first]
            kept = allocate(shares, sizes, total)
        scores = on_cpu([view[Evidence.CLS_ROW] for view in views])
        return [best(row, count) for row, count in zip(scores, kept, strict=True)]


def content(whole: GridView, first: np.ndarray, parts: Sequence[Part]) -> list[int]:
    """For each of ``parts``, the number of the best ``1 - WHOLE`` patches of the ``whole`` view by the scores ``first``
    of its first layer (``[n]``) whose centre is in the part."""
    chosen = np.zeros(whole.size, dtype=bool)
    chosen[highest(first, int(whole.size * (1 - WHOLE)))] = True
    grid = chosen.reshape(whole.rows, whole.columns)
    down, across = ((np.arange(count) + 0.5) / count for count in (whole.rows, whole.columns))
    found = []
    for part in parts:
        rows = (part.top <= down) & (down < part.bottom)
        columns = (part.left <= across) & (across < part.right)
        found.append(int(grid[rows][:, columns].sum()))
    return found


def tile_budgets(contents: Sequence[int], sizes: Sequence[int], total: int) -> list[int]:
    """Each tile's share of ``total`` tokens by its content, rounded down (in fp32), and at most its size."""
    shares = np.asarray(contents, np.float32) / np.float32(max(1, sum(contents)))
    budgets = (shares * np.float32(min(total, sum(sizes)))).astype(np.int64)
    kept: list[int] = np.minimum(budgets, sizes).tolist()
    return kept


def allocate(shares: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """``total`` tokens distributed in proportion to ``shares``, at most its size for each grid; rounded by highest
    averages (D'Hondt), with ties broken by order."""
    of = np.repeat(np.arange(len(sizes)), sizes)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    averages = np.asarray(shares)[of] / (nth + 1)
    chosen = np.argsort(-averages, kind="stable")[:total]
    kept: list[int] = np.bincount(of[chosen], minlength=len(sizes)).tolist()
    return kept
