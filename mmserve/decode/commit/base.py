"""Commit policies: which candidates of a step become final."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmserve.core.canvas import Canvas


@dataclass(frozen=True)
class Candidates:
    """One proposed token for each masked position of the current block, with the model's probability of it."""

    positions: np.ndarray  # int64 [n], ascending
    tokens: np.ndarray  # int64 [n]
    confidence: np.ndarray  # float32 [n], untempered softmax probability


class Commit(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        """Bool ``[n]``: the candidates that become final, at least one of them.

        ``canvas.block_step`` counts the forward passes made for the block, the one behind the candidates included.
        """
        ...


def most_confident(candidates: Candidates, count: int) -> np.ndarray:
    """Bool ``[n]``: the ``count`` most confident candidates; of equals, the leftmost."""
    chosen = np.zeros(len(candidates.positions), dtype=bool)
    chosen[np.argsort(-candidates.confidence, kind="stable")[:count]] = True
    return chosen
