"""RedVTP (arXiv 2511.12428): the patches that the masked answer attends to most before the first denoising step.

RedVTP asks a whole first step and drops after it; here half of the decoder is asked, and the first step is without
them already. What the masked positions look at changes little from step to step, so once is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmserve.core.request import Amount
from mmserve.prune.base import SCORED, Evidence, GridView, Plan, best_together


@dataclass(frozen=True)
class RedVtp:
    """By the masked positions' attention, mean over them and heads; the frames of a clip are judged together."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.MASK_ROWS})
    amounts: ClassVar[frozenset[str]] = SCORED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        return best_together([view[Evidence.MASK_ROWS] for view in views], amount)
