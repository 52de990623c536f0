"""MustDrop's output-aware cache (arXiv 2411.10803): of the visual positions those that the answer attends to stay.

What the answer looks at is known once some of it is there: then the others are dropped, once. Text always stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmserve.core.policies import kv_reduction as numbers
from mmserve.core.values import Checked
from mmserve.kv.reduction.base import Held, LayerView, Signal, best


@dataclass(frozen=True, kw_only=True)
class VisualCache(numbers.VisualCache, Checked):
    """``budget`` visual positions, by the attention of the queries that made the first ``outputs`` tokens."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def first_query(self, prompt: int) -> int:
        return prompt - 1  # the first token of the answer is made at the prompt's last

    def target(self, held: Held) -> int:
        surplus = held.visual - self.budget if held.outputs >= self.outputs else 0
        return held.positions - max(0, surplus - held.dropped)

    def most(self, held: Held, left: int) -> int:
        return held.positions + left

    def keep(self, view: LayerView, count: int) -> Tensor:
        assert view.attention_GL is not None
        return best(view.attention_GL.masked_fill(~view.visual_GL, torch.inf), count)
