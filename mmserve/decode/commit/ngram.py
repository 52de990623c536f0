"""Prompt-lookup speculation for next-token models (apoorvumang/prompt-lookup-decoding; vLLM's ``ngram``).

The last tokens are searched in the preceding text; the tokens that followed their first occurrence are the draft. As in
vLLM, as many of the last tokens as possible are matched, and a draft ends where the text ends. One pass runs the whole
draft, and the tokens that the model would have chosen itself are kept. If greedy, the answer equals the one
without a draft, except for ties: a row that runs with a draft is summed in another order than alone, so of two tokens
whose logits differ only in the last bits, the other may be chosen. If sampled, the answer is another draw from the same
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import Candidates, CommitDefaults


@dataclass(frozen=True)
class Ngram(numbers.Ngram, CommitDefaults):
    """Look up the last ``longest`` tokens, or as few as ``shortest``, and draft the ``length`` tokens after them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise ValueError(f"shortest must be at most longest, which is {self.longest}, not {self.shortest}")

    @property
    def whole_canvas(self) -> bool:
        """True: a draft extends past the current block of one token."""
        return True

    def draft(self, canvas: Canvas) -> np.ndarray:
        known = canvas.tokens[: canvas.known()]
        most = min(self.length, canvas.size - len(known) - 1)  # one more follows the last drafted token
        for size in range(min(self.longest, len(known) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(known[:-1], size)
            found = np.flatnonzero((windows == known[-size:]).all(1))
            if len(found):
                start = int(found[0]) + size
                return known[start : start + max(0, most)]
        return known[:0]

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        drafted = self.draft(canvas)[: len(candidates.positions) - 1]
        agreed = candidates.tokens[: len(drafted)] == drafted
        kept = int(np.argmin(agreed)) if not agreed.all() else len(drafted)
        return np.arange(len(candidates.positions)) <= kept
