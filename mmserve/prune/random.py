"""The baseline of all pruners: randomly chosen patches. Published studies find it hard to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Plan, counts


@dataclass(frozen=True)
class Random:
    """``seed`` (64 bits): of the request; each frame of a clip is sampled independently."""

    needs: ClassVar[frozenset[Evidence]] = frozenset()
    amounts: ClassVar[frozenset[str]] = COUNTED
    seed: int = 0

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [view.size for view in views]
        return [
            Plan(torch.from_numpy(np.sort(torch.randperm(size, generator=generator).numpy()[:count])))
            for size, count in zip(sizes, counts(sizes, amount), strict=True)
        ]
