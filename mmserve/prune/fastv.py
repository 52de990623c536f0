"""FastV (arXiv 2403.06764): the patches that the prompt's last token attends to most in the decoder's second layer.

FastV drops the others after that layer; here the prompt is prefilled again without them, so that no layer stores their
K/V and the result is bitwise that of a prompt without them. With n positions, a kept share s and l layers, the cost is
one scoring layer plus a prefill of s n: n (1 + s l) positions through a layer, while FastV runs n (2 + s (l - 2)):
cheaper if less than half is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import SCORED, Evidence, GridView, Plan, best_together


@dataclass(frozen=True)
class FastV:
    """Scores: the last token's attention, mean over heads; the frames of a clip are ranked together."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.LAST_ROW})
    amounts: ClassVar[frozenset[str]] = SCORED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        return best_together([view[Evidence.LAST_ROW] for view in views], amount)
