"""The interface of reuse rules: their input for the images of a prompt, and their decision.

An image's K/V were computed for it alone. A rule selects the image positions that are recomputed in this prompt; the
K/V of the others are reused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

#: Tolerance for rounding errors of a share times a count.
_ROUNDING = 1e-9


class Reuse(Protocol):
    """One rule with its parameters; holds no state of a request."""

    @property
    def layers(self) -> int:
        """The number of the decoder's first layers that must be run on this prompt, at least 2; 0 = none."""
        ...

    @property
    def by_attention(self) -> bool:
        """Whether the deviation is that of values alone, weighted by the attention that the position receives."""
        ...

    @property
    def each_step(self) -> int:
        """The number of positions not run by prefill that each decode pass runs in addition."""
        ...

    def count(self, sizes: Sequence[int]) -> int:
        """The number of positions that are recomputed, for images of these ``sizes``; known before the selection."""
        ...

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        """The positions to recompute: int64, ascending, counted through all images.

        ``deviation``: float32, for each position the squared difference between the reused and this prompt's keys and
        values in the last of its ``layers``; if ``by_attention``, the sum of absolute differences of values times the
        attention that the position receives there from all rows that attend to it. Empty if ``layers`` is 0.
        """
        ...


def share_of(size: int, share: float) -> int:
    """``share`` of ``size`` positions, rounded up."""
    return math.ceil(size * share - _ROUNDING)


def largest(deviation: np.ndarray, count: int) -> np.ndarray:
    """The indices of the ``count`` largest: int64, ascending; ties go to the first."""
    return np.sort(np.argsort(-deviation, kind="stable")[:count])
