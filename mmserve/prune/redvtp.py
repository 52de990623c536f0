"""RedVTP (arXiv 2511.12428): the patches that the masked answer attends to most before the first denoising step.

RedVTP runs a whole first step and drops patches after it; here half of the decoder is run for scoring, and the first
step already runs without them. The attention of masked positions changes little between steps, so one scoring
suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import SCORED, Evidence, GridView, Plan, best_together


@dataclass(frozen=True)
class RedVtp:
    """Scores: the attention of the masked positions, mean over them and heads; the frames of a clip are ranked
    together."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.MASK_ROWS})
    amounts: ClassVar[frozenset[str]] = SCORED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        return best_together([view[Evidence.MASK_ROWS] for view in views], amount)
