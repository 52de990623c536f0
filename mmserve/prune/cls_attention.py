"""FasterVLM (arXiv 2412.01818): the patches that the tower's class token attends to most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import SCORED, Evidence, GridView, Plan, by_scores


@dataclass(frozen=True)
class ClsAttention:
    """Scores: the class token's attention, mean over heads, in the layer that computes the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW})
    amounts: ClassVar[frozenset[str]] = SCORED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        return by_scores([view[Evidence.CLS_ROW] for view in views], amount)
