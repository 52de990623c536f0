"""A baseline: positions drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.kv.reuse.base import check_share, share_of


@dataclass(frozen=True, kw_only=True)
class RandomReuse:
    """The ``recompute`` share of all images' positions, drawn by ``seed``."""

    layers: ClassVar[int] = 0
    weighed: ClassVar[bool] = False
    each_step: ClassVar[int] = 0
    recompute: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.recompute)

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return np.sort(np.random.default_rng(self.seed).permutation(sum(sizes))[: self.count(sizes)])
