"""Prophet's early commit (arXiv 2508.19982; pixeli99/Prophet, generate_earlyexit.py), over any other policy.

When the model is sure enough of the answer, everything that is left is committed at once. Sure is measured by the mean
gap between the two highest logits over the answer's positions; how sure it must be falls as decoding goes on. The
reference knows five answer positions and one request at a time; here the answer region comes from the request, or is
the current block, and each request decides for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import Candidates, Commit, Undrafted

#: Shares of the steps at which the second and the third gap begin to count.
MIDDLE, LATE = 0.33, 0.67


@dataclass(frozen=True, kw_only=True)
class EarlyCommit(Undrafted):
    """Commit what is left once the answer's mean gap reaches ``early`` (then ``middle``, then ``late``); else ``base``.

    ``answer_start`` and ``answer_length`` name the answer's positions, counted from the first generated one; then
    everything masked is committed. With a length of 0 the answer is the current block, and the block is committed.
    A position of the answer that is final already is not in doubt: only masked ones count, and an answer without any
    is sure.
    ``steps``: denoising steps for the whole canvas, of which the progress is a share; 0 = one token a step.
    """

    base: Commit
    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5
    answer_start: int = 0
    answer_length: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        if any(np.isnan(gap) for gap in (self.early, self.middle, self.late)):
            raise ValueError("early, middle and late must be numbers")
        if min(self.answer_start, self.answer_length) < 0:
            raise ValueError("answer_start and answer_length must be at least 0")

    @property
    def whole_canvas(self) -> bool:
        """With an answer region: it may lie in a later block, and what is left is more than the block."""
        return self.answer_length > 0 or self.base.whole_canvas

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        block = candidates.positions < canvas.block_end
        start, end = self._region(canvas)
        region = (candidates.positions >= start) & (candidates.positions < end)
        open_there = int(canvas.masked[start:end].sum())
        # A region past the canvas says nothing, nor does one of which a recompute policy left some out of this pass.
        judged = start < end and int(region.sum()) == open_there
        if judged and (not open_there or float(candidates.gap[region].mean()) >= self._needed(canvas)):
            return np.ones_like(block) if self.answer_length else block
        if self.base.whole_canvas:
            return self.base.choose(canvas, candidates)
        chosen = np.zeros_like(block)
        chosen[block] = self.base.choose(canvas, candidates.where(block))
        return chosen

    def _region(self, canvas: Canvas) -> tuple[int, int]:
        """First position of the answer, and the first behind it."""
        if not self.answer_length:
            return canvas.block_start, canvas.block_end
        start = min(canvas.prompt_length + self.answer_start, canvas.size)
        return start, min(start + self.answer_length, canvas.size)

    def _needed(self, canvas: Canvas) -> float:
        progress = canvas.step / (self.steps or canvas.new_tokens)
        return self.early if progress < MIDDLE else self.middle if progress < LATE else self.late
