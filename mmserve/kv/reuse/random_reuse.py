"""A baseline: positions drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmserve.core.policies import image_reuse as numbers
from mmserve.core.values import Checked
from mmserve.kv.reuse.base import share_of


@dataclass(frozen=True, kw_only=True)
class RandomReuse(numbers.RandomReuse, Checked):
    """The share ``recompute`` of all images' positions, drawn at random with ``seed``."""

    layers: ClassVar[int] = 0
    by_attention: ClassVar[bool] = False
    each_step: ClassVar[int] = 0
    seed: int = 0

    def count(self, sizes: Sequence[int]) -> int:
        return share_of(sum(sizes), self.recompute)

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        return np.sort(np.random.default_rng(self.seed).permutation(sum(sizes))[: self.count(sizes)])
