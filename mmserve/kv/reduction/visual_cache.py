"""MustDrop's output-aware cache (arXiv 2411.10803): keeps the visual positions that the answer attends to.

Visual positions are dropped once, after the first answer tokens, by the attention of these. Text is always kept.
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
    """Keeps ``budget`` visual positions, by the attention of the queries of the first ``outputs`` answer tokens."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def first_query(self, prompt: int) -> int:
        return prompt - 1  # the prompt's last row predicts the first token

    def target(self, held: Held) -> int:
        surplus = held.visual - self.budget if held.outputs >= self.outputs else 0
        return held.positions - max(0, surplus - held.dropped)

    def most(self, held: Held, left: int) -> int:
        return held.positions + left

    def select(self, view: LayerView, count: int) -> Tensor:
        assert view.attention_GL is not None
        return best(view.attention_GL.masked_fill(~view.visual_GL, torch.inf), count)
