"""CacheBlend (arXiv 2405.16444): recomputes the positions that this prompt changes most.

The paper narrows the selection layer by layer; as in its authors' LMCache, one layer here decides for all later ones.
By default that is the second layer: a later one selects better, but more layers must be run for all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.policies import image_reuse as numbers
from mmserve.core.values import Checked
from mmserve.kv.reuse.base import largest, share_of


@dataclass(frozen=True, kw_only=True)
class Blend(numbers.Blend, Checked):
    """The share ``recompute`` of all images' positions with the largest deviation at the last of the first ``layers``
    layers; in those layers, the K/V of all positions are recomputed. Ties go to the first position."""

    by_attention: ClassVar[bool] = False
    each_step: ClassVar[int] = 0

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return largest(deviation, self.count(sizes))
