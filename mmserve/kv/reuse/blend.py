"""CacheBlend (arXiv 2405.16444): what this prompt changes most is run again.

The paper narrows its choice layer by layer; as in its authors' LMCache, one layer decides here for all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.kv.reuse.base import check_share, share_of


@dataclass(frozen=True, kw_only=True)
class Blend:
    """The ``recompute`` share of all images' positions with the largest deviation; of equal ones the first."""

    looks: ClassVar[bool] = True
    recompute: float = 0.15

    def __post_init__(self) -> None:
        check_share(self.recompute)

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return np.sort(np.argsort(-deviation, kind="stable")[: self.count(sizes)])
