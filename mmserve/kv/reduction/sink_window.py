"""StreamingLLM (arXiv 2309.17453): the first positions (attention sinks), and the latest ones.

The paper renumbers the kept positions; here they stay the original ones, so that no key is rotated again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmserve.core.policies import kv_reduction as numbers
from mmserve.kv.reduction.base import Budgeted, LayerView, Signal, check_budget


@dataclass(frozen=True, kw_only=True)
class SinkWindow(numbers.SinkWindow, Budgeted):
    """Keeps ``budget`` positions: the first ``sinks`` and the latest ones."""

    signals: ClassVar[frozenset[Signal]] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks)

    def first_query(self, prompt: int) -> int:
        return prompt  # no query is observed

    def select(self, view: LayerView, count: int) -> Tensor:
        heads, length = view.visual_GL.shape
        places = torch.arange(count, device=view.visual_GL.device)
        places[self.sinks :] += length - count
        return places.expand(heads, -1)
