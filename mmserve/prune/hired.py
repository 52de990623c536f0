"""HiRED (arXiv 2408.10945): the first layer's class token says how many tokens each grid gets, a later one's which.

An image of one grid gets the whole budget, and the frames of a clip share theirs by how much of each one's own class
attention falls on patches. Of an image in tiles, its whole view gets at most ``WHOLE`` of the budget, and the tiles
share the rest by how much of the whole view's attention falls on what they show. The authors' code (hasanar1f/HiRED)
counts the best half of its patches instead of summing, and takes them for those of a tile in the order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Part, Plan, best, on_cpu, total_count

WHOLE = 0.5  # most of the budget that the whole view of an image in tiles gets


@dataclass(frozen=True)
class Hired:
    """Within a grid, by the class token's row of attention in the layer that made the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.FIRST_CLS_ROW})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        sizes = [look.size for look in looks]
        total = total_count(sizes, amount)
        at = next((i for i, look in enumerate(looks) if look.part is None), 0)  # the whole view, where there are tiles
        parts = [look.part for look in looks if look.part is not None]
        first = on_cpu([look[Evidence.FIRST_CLS_ROW] for look in (looks[at : at + 1] if parts else looks)])
        if parts:
            others = sizes[:at] + sizes[at + 1 :]
            whole = min(max(int(total * WHOLE), total - sum(others)), sizes[at])
            kept = allocate([_on(looks[at], first[0], part) for part in parts], others, total - whole)
            kept.insert(at, whole)
        else:
            shares = [float(row.sum(dtype=np.float64)) for row in first]
            kept = allocate(shares, sizes, total)
        scores = on_cpu([look[Evidence.CLS_ROW] for look in looks])
        return [best(row, count) for row, count in zip(scores, kept, strict=True)]


def _on(whole: Look, first: np.ndarray, part: Part) -> float:
    """How much of the ``whole`` view's attention in its ``first`` layer falls on patches whose centre lies in
    ``part``."""
    row = first.astype(np.float64).reshape(whole.rows, whole.columns)
    rows, columns = (
        [first <= (i + 0.5) / count < last for i in range(count)]
        for first, last, count in ((part.top, part.bottom, whole.rows), (part.left, part.right, whole.columns))
    )
    return float(row[rows][:, columns].sum())


def allocate(shares: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """``total`` tokens in proportion to ``shares``, no grid more than its size; rounded by highest averages (D'Hondt),
    of equal ones the first."""
    of = np.repeat(np.arange(len(sizes)), sizes)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    averages = np.asarray(shares)[of] / (nth + 1)
    chosen = np.argsort(-averages, kind="stable")[:total]
    kept: list[int] = np.bincount(of[chosen], minlength=len(sizes)).tolist()
    return kept
