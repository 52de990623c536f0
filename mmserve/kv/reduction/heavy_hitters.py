"""H2O (arXiv 2306.14048): the positions that received the most attention so far, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmserve.core.policies import kv_reduction as numbers
from mmserve.kv.reduction.base import Budgeted, LayerView, Signal, best


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(numbers.HeavyHitters, Budgeted):
    """Keeps ``budget`` positions; the last ``recent`` share of them (0 to 1) is always kept."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION})

    def first_query(self, prompt: int) -> int:
        return 0

    def select(self, view: LayerView, count: int) -> Tensor:
        assert view.attention_GL is not None
        scores_GL = view.attention_GL.clone()
        scores_GL[:, scores_GL.shape[1] - round(count * self.recent) :] = torch.inf
        return best(scores_GL, count)
