"""Fast-dLLM's factor rule (arXiv 2505.22618; NVlabs/Fast-dLLM, llada/generate.py: get_transfer_index_dynamic)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import BlockWise, Candidates, most_confident


@dataclass(frozen=True)
class Factor(numbers.Factor, BlockWise):
    """Commits the n most confident candidates, with the largest n whose n-th confidence is at least ``1 - factor / (n +
    1)``.

    The more tokens are committed together, the more confident each must be; at least one is committed.
    """

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        ordered = -np.sort(-candidates.confidence)
        needed = 1 - self.factor / (np.arange(1, len(ordered) + 1) + 1)
        enough = np.flatnonzero(ordered >= needed)
        return most_confident(candidates, int(enough[-1]) + 1 if len(enough) else 1)
