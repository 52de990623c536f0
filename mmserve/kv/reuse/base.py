"""The input of a reuse rule for the images of one prompt, and its decision.

An image's K/V were computed for it alone. A rule selects its positions that are run again in this prompt; the
others are read as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

#: A share times a count is this near to a whole number where only rounding keeps it from being one.
_ROUNDING = 1e-9


class Reuse(Protocol):
    """One rule with its numbers; it holds no state of a request."""

    @property
    def layers(self) -> int:
        """How many of the decoder's first layers it must see this prompt in, at least 2; 0 = it looks at nothing."""
        ...

    @property
    def weighed(self) -> bool:
        """Whether a deviation is of values alone, and counts by the attention that its position draws."""
        ...

    @property
    def each_step(self) -> int:
        """How many of the positions that prefill did not run are run beside each pass that decodes."""
        ...

    def count(self, sizes: Sequence[int]) -> int:
        """How many positions of images of these ``sizes`` are run again, which is known before any is chosen."""
        ...

    def choose(self, sizes: Sequence[int], deviation: np.ndarray) -> np.ndarray:
        """Which: int64, ascending, counted through all images.

        ``deviation``: float32, of each position, how far keys and values of the last of its ``layers`` are from what
        they are in this prompt, squared; where deviations are ``weighed``, how far its values are (the sum of absolute
        differences) times the attention that all that the prompt sees gives it there. Empty where it looks at nothing.
        """
        ...


def share_of(size: int, share: float) -> int:
    """``share`` of ``size`` positions, rounded up."""
    return math.ceil(size * share - _ROUNDING)


def largest(deviation: np.ndarray, count: int) -> np.ndarray:
    """Where the ``count`` largest are: int64, ascending; of equal ones the first."""
    return np.sort(np.argsort(-deviation, kind="stable")[:count])
