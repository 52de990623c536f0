"""ZipVL (arXiv 2410.08584): the fewest patches that draw a given share of the attention, fewer where it is narrow.

ZipVL does so in each layer of the decoder; here it is done once, on the tower's own attention, before the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import Evidence, Look, Plan, best_together


@dataclass(frozen=True)
class ZipVl:
    """By the column means of attention in the layer that made the features; the grids of a clip are judged together."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.COLUMN_MEANS})
    amounts: ClassVar[frozenset[str]] = frozenset({"attention_mass"})

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        return best_together([look[Evidence.COLUMN_MEANS] for look in looks], amount)
