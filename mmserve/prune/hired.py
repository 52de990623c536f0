"""HiRED (arXiv 2408.10945): the first layer's class token says how many tokens each grid gets, a later one's which.

The budget of a picture's grids goes by how much of the first layer's class attention falls on patches. An image is one
grid here and gets all of it; the frames of a clip share theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, best, total_count


@dataclass(frozen=True)
class Hired:
    """Within a grid, by the class token's row of attention in the layer that made the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.FIRST_CLS_ROW})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        sizes = [look.size for look in looks]
        shares = [float(look[Evidence.FIRST_CLS_ROW].double().sum()) for look in looks]
        kept = allocate(shares, sizes, total_count(sizes, amount))
        return [best(look[Evidence.CLS_ROW], count) for look, count in zip(looks, kept, strict=True)]


def allocate(shares: Sequence[float], sizes: Sequence[int], total: int) -> list[int]:
    """``total`` tokens in proportion to ``shares``, no grid more than its size; rounded by highest averages (D'Hondt),
    of equal ones the first."""
    kept = [0] * len(sizes)
    for _ in range(min(total, sum(sizes))):
        growing = [i for i, size in enumerate(sizes) if kept[i] < size]
        kept[max(growing, key=lambda i: shares[i] / (kept[i] + 1))] += 1
    return kept
