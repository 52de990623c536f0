"""For towers without a class token, such as SigLIP: the patches that receive the most attention from all positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import SCORED, Evidence, GridView, Plan, by_scores


@dataclass(frozen=True)
class ColumnAttention:
    """Scores: column means of attention, over positions and heads, in the layer that computes the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.COLUMN_MEANS})
    amounts: ClassVar[frozenset[str]] = SCORED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        return by_scores([view[Evidence.COLUMN_MEANS] for view in views], amount)
