"""Entropy-bounded unmasking (arXiv 2505.24857; EntropyBoundScheduler in huggingface/diffusers)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import ENTROPY, BlockWise, Candidates, first


@dataclass(frozen=True)
class EntropyBound(numbers.EntropyBound, BlockWise):
    """Commits the most candidates of lowest entropy whose entropies, without the largest, sum to at most ``bound``
    (nats).

    The sum bounds the error of treating these candidates as independent. The candidate of lowest entropy is always
    taken.
    """

    @property
    def reads(self) -> frozenset[str]:
        """The entropy."""
        return frozenset({ENTROPY})

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        entropy = candidates.read_entropy()
        ordered = np.sort(entropy).astype(np.float64)
        before = np.cumsum(ordered) - ordered
        return first(entropy, max(1, int((before <= self.bound).sum())))
