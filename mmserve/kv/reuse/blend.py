"""CacheBlend (arXiv 2405.16444): what this prompt changes most is run again.

The paper narrows its choice layer by layer; as in its authors' LMCache, one layer decides here for all that follow.
It is the second unless more are asked for: the later it is, the better it knows, and the more is run.
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
    """The ``recompute`` share of all images' positions with the largest deviation at the last of ``layers``, the first
    of the decoder, all of whose K/V are those of this prompt; of equal ones the first."""

    weighed: ClassVar[bool] = False
    each_step: ClassVar[int] = 0

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return largest(deviation, self.count(sizes))
