"""EPIC's LegoLink (arXiv 2410.15332): recomputes the first positions of each image: computed alone, they were attention
sinks, which they are not in this prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.policies import image_reuse as numbers
from mmserve.core.values import Checked
from mmserve.kv.reuse.base import share_of


@dataclass(frozen=True, kw_only=True)
class LegoLink(numbers.LegoLink, Checked):
    """The first ``recompute`` share of each image's positions. The paper has a fixed number, such as 16."""

    layers: ClassVar[int] = 0
    by_attention: ClassVar[bool] = False
    each_step: ClassVar[int] = 0

    def count(self, sizes: Sequence[int]) -> int:
        return sum(share_of(size, self.recompute) for size in sizes)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        starts = np.cumsum([0, *sizes])
        chosen = [start + np.arange(share_of(n, self.recompute)) for start, n in zip(starts, sizes, strict=False)]
        return np.concatenate([np.zeros(0, np.int64), *chosen])
