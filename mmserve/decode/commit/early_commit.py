"""Prophet's early commit (arXiv 2508.19982; pixeli99/Prophet, generate_earlyexit.py), over any other policy.

When the model is sure enough of the answer, everything that is left is committed at once. Sure is measured by the mean
gap between the two highest logits over all of the answer's positions, final ones included; how sure it must be falls as
decoding goes on. The reference knows five answer positions, one request at a time and no cache. Here the answer region
comes from the request, or is the current block, each request decides for itself, final positions that a recompute
policy leaves out of a pass are not part of its mean, and nothing after an end of text is: that padding is sure long
before the answer is, and there is more of it.

A mean is high where most of an answer is plain and one figure of it is not, as in a sum: ``mistakes`` is a measure of
our own that weighs the worst open positions most.

Where the answer begins the reference knows because it writes the words in front of it onto the canvas itself. Here they
are looked for among the tokens that the model has made final; among candidates they might yet go away or move. They are
looked for in what the tokens spell, so that it does not matter which tokens they became or what they share one with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import GIVEN, MASKED, Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import GAP, Candidates, Commit, Undrafted

#: Shares of the steps at which the second and the third gap begin to count.
MIDDLE, LATE = 0.33, 0.67


@dataclass(frozen=True, kw_only=True)
class EarlyCommit(numbers.EarlyCommit, Undrafted):
    """Commit what is left once the answer's mean gap reaches ``early`` (then ``middle``, then ``late``); else ``base``.

    ``answer_start`` and ``answer_length`` name the answer's positions, counted from the first generated one; then
    everything masked is committed. With a length of 0 the answer is the current block, and the block is committed.
    With ``answer_after``, the answer's positions are the ``answer_length`` after the first token by which final tokens
    of the answer, next to one another, spell that text; with a length of 0, those of the current block after it. Until
    it is found ``base`` goes on. ``spell``: what a row of tokens (int64 ``[n]``) reads.
    The mean is over the answer's positions whose logits the pass has, all masked ones among them; an answer that is
    final is sure only if their gaps are, and one that was there before the first pass never is.
    ``ends``: tokens that end an answer; nothing after the first of them in it, final or proposed, counts.
    ``mistakes``: where above 0, it is sure instead when no more of the masked positions than that are expected to be
    wrong, at any time: a gap g between two candidates makes the other right with probability 1 / (1 + e^g).
    ``steps``: denoising steps for the whole canvas, of which the progress is a share; 0 = one token a step.
    """

    base: Commit  # type: ignore[assignment]  # the policy itself, of which a request has the name
    steps: int = 0
    spell: Callable[[np.ndarray], str] | None = None
    ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer_after and self.answer_start:
            raise ValueError("answer_start must be 0 with answer_after: the answer begins where that text is found")

    @property
    def whole_canvas(self) -> bool:
        """With an answer region: it may lie in a later block, and what is left is more than the block."""
        return self.answer_length > 0 or self.base.whole_canvas

    @property
    def closes(self) -> bool:
        """Where the policy it builds on does."""
        return self.base.closes

    @property
    def reads(self) -> frozenset[str]:
        """The gap, and what the policy it builds on reads."""
        return self.base.reads | {GAP}

    def regarded(self, canvas: Canvas) -> np.ndarray:
        """The answer's final positions, whose gaps are part of the mean."""
        start, end = (0, 0) if self.mistakes else self._region(canvas)
        return start + np.flatnonzero(canvas.committed_at[start:end] != MASKED)

    def needed(self, canvas: Canvas, positions: np.ndarray) -> np.ndarray:
        start, end = self._region(canvas)
        inside = (positions < canvas.block_end) | ((positions >= start) & (positions < end))
        return inside | self.base.whole_canvas

    def enough(self, canvas: Canvas, candidates: Candidates) -> bool:
        return not self.answer_length or not self._sure(canvas, candidates)

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        masked = canvas.committed_at[candidates.positions] == MASKED
        block = masked & (candidates.positions < canvas.block_end)
        if self._sure(canvas, candidates):
            return masked if self.answer_length else block
        shown = masked if self.base.whole_canvas else block
        chosen = np.zeros_like(masked)
        chosen[shown] = self.base.choose(canvas, candidates.where(shown))
        return chosen

    def _sure(self, canvas: Canvas, candidates: Candidates) -> bool:
        masked = canvas.committed_at[candidates.positions] == MASKED
        start, end = self._region(canvas)
        end = self._ended(canvas, candidates.where(masked), start, end)
        region = (candidates.positions >= start) & (candidates.positions < end)
        # A region past the canvas has no effect, nor does one that was complete from the start, nor one of which a
        # recompute policy left a masked position out of this pass.
        if not (canvas.committed_at[start:end] > GIVEN).any():
            return False
        if int((region & masked).sum()) < int(canvas.masked[start:end].sum()):
            return False
        gaps = candidates.read_gap().astype(np.float64)
        if self.mistakes:
            return self._expected(gaps[region & masked]) <= self.mistakes
        return bool(region.any()) and float(gaps[region].mean()) >= self._needed(canvas)

    @staticmethod
    def _expected(gaps: np.ndarray) -> float:
        """Tokens that are expected to be wrong among candidates with these ``gaps`` (float64 ``[n]``)."""
        second = np.exp(-np.maximum(gaps, 0))
        return float((second / (1 + second)).sum())

    def _region(self, canvas: Canvas) -> tuple[int, int]:
        """First position of the answer, and the first after it."""
        start = self._found(canvas) if self.answer_after else canvas.prompt_length + self.answer_start
        if not self.answer_length:
            return max(start if self.answer_after else 0, canvas.block_start), canvas.block_end
        start = min(start, canvas.size)
        return start, min(start + self.answer_length, canvas.size)

    def _ended(self, canvas: Canvas, candidates: Candidates, start: int, end: int) -> int:
        """The first position after an end of text among those from ``start`` on, at most ``end``."""
        tokens = canvas.tokens.copy()
        tokens[candidates.positions] = candidates.tokens
        over = np.flatnonzero(np.isin(tokens[start:end], list(self.ends)))
        return start + int(over[0]) + 1 if len(over) else end

    def _found(self, canvas: Canvas) -> int:
        """First position after ``answer_after``, ``canvas.size`` where it is not found."""
        final = canvas.committed_at[canvas.prompt_length :] != MASKED
        edges = np.flatnonzero(np.diff(np.concatenate([[False], final, [False]]))) + canvas.prompt_length
        for start, end in edges.reshape(-1, 2).tolist():
            length = self._until(canvas.tokens[start:end])
            if length is not None:
                return int(start) + length
        return canvas.size

    def _until(self, tokens: np.ndarray) -> int | None:
        """How many of ``tokens``, from the first on, it takes to spell ``answer_after``; None = all of them do not."""
        spell = self.spell
        if spell is None:
            raise ValueError("a text can only be looked for with a tokenizer")
        if self.answer_after not in spell(tokens):
            return None
        return bisect_left(range(len(tokens)), True, key=lambda size: self.answer_after in spell(tokens[:size]))

    def _needed(self, canvas: Canvas) -> float:
        progress = canvas.step / (self.steps or canvas.new_tokens)
        return self.early if progress < MIDDLE else self.middle if progress < LATE else self.late
