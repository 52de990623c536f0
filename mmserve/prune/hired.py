"""HiRED (arXiv 2408.10945): the first layer's class token sets how many tokens each tile gets, a later layer's which.

Budgets are counted and rounded as in hasanar1f/HiRED (``HiRED_token_selection`` and ``HiRED_sub_img_budgets`` of its
LLaVA-NeXT). One difference: a tile's share is counted among the patches of the whole view that show the same part of
the picture, as in the paper; the code cuts the view's patches, in the order of rows, into as many runs of equal length.
The frames of a clip, which the paper does not treat, share the amount by how much of each one's class attention is on
patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Part, Plan, best, highest, on_cpu

#: The code's ``alpha``: most of the amount that the whole view of an image in tiles gets. Its other patches, as many as
#: the best ``1 - WHOLE`` in the first layer, are the content that tiles share the rest by.
WHOLE = 0.5


@dataclass(frozen=True)
class Hired:
    """Within a grid, by the class token's row of attention in the layer that made the features.

    A share of the patches is rounded down, and so is each tile's share of the rest: fewer tokens than the amount may be
    kept of an image in tiles.
    """

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.FIRST_CLS_ROW})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        sizes = [view.size for view in views]
        wanted = amount.value if amount.name == "token_budget" else sum(sizes) * amount.value
        total = min(sum(sizes), max(1, int(wanted)))
        at = next((i for i, view in enumerate(views) if view.part is None), 0)  # the whole view, where there are tiles
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
    """How many of the best ``1 - WHOLE`` patches of the ``whole`` view in its ``first`` layer (``[n]``) have their
    centre in each of ``parts``."""
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
    """Each tile's share of ``total`` tokens by its content, rounded down (in fp32), and no more than its size."""
    shares = np.asarray(contents, np.float32) / np.float32(max(1, sum(contents)))
    budgets = (shares * np.float32(min(total, sum(sizes)))).astype(np.int64)
    kept: list[int] = np.minimum(budgets, sizes).tolist()
    return kept


def allocate(shares: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """``total`` tokens in proportion to ``shares``, no grid more than its size; rounded by highest averages (D'Hondt),
    of equal ones the first."""
    of = np.repeat(np.arange(len(sizes)), sizes)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    averages = np.asarray(shares)[of] / (nth + 1)
    chosen = np.argsort(-averages, kind="stable")[:total]
    kept: list[int] = np.bincount(of[chosen], minlength=len(sizes)).tolist()
    return kept
