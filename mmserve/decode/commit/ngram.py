"""Prompt-lookup speculation for next-token models (apoorvumang/prompt-lookup-decoding; vLLM's ``ngram``).

The last tokens are looked up in the text before them; what followed there is the draft. One pass runs the whole
draft, and the tokens that the model itself would have chosen are kept. Greedy, the answer is the one without a draft,
in fewer passes, but for ties: a row beside a draft's sums in another order than alone, so where two tokens are equally
likely but for the last bits of their logits, the other may be chosen. Drawn, it is another draw from the same
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import Candidates, Undrafted


@dataclass(frozen=True)
class Ngram(numbers.Ngram, Undrafted):
    """Look up the last ``longest`` tokens, or as few as ``shortest``, and draft the ``length`` tokens after them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise ValueError(f"shortest must be at most longest, which is {self.longest}, not {self.shortest}")

    @property
    def whole_canvas(self) -> bool:
        """A draft reaches past the block of one token."""
        return True

    def draft(self, canvas: Canvas) -> np.ndarray:
        known = canvas.tokens[: canvas.known()]
        most = min(self.length, canvas.size - len(known) - 1)  # one more follows the last drafted token
        for size in range(min(self.longest, len(known) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(known[:-1], size)
            found = np.flatnonzero((windows == known[-size:]).all(1))
            if len(found):
                start = int(found[-1]) + size  # the latest match: recent text predicts best
                return known[start : start + max(0, most)]
        return known[:0]

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        drafted = self.draft(canvas)[: len(candidates.positions) - 1]
        agreed = candidates.tokens[: len(drafted)] == drafted
        kept = int(np.argmin(agreed)) if not agreed.all() else len(drafted)
        return np.arange(len(candidates.positions)) <= kept
