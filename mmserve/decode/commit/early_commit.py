"""Prophet's early commit (arXiv 2508.19982; pixeli99/Prophet, generate_earlyexit.py), over any other policy.

Once the model is confident enough about the answer, all remaining tokens are committed at once. Confidence is measured
by the mean gap between the two highest logits over all positions of the answer, including final ones; the required gap
falls as decoding proceeds. The reference has a fixed answer region of five positions, one request at a time and no
cache. Here the answer region comes from the request, or is the current block; each request decides separately; final
positions that a recompute policy does not run are not part of the mean, and neither are positions after an end of text:
that padding becomes confident long before the answer does, and would dominate the mean.

A mean can be high although one token of the answer is uncertain, such as one digit of a sum: ``mistakes`` is an
additional measure of this project that gives most weight to the least confident open positions.

The reference finds the start of the answer because it writes the preceding words onto the canvas itself. Here these
words are searched among final tokens only, because candidates may still change or move. The search uses the decoded
text, so it does not depend on the tokenisation of the words.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import GIVEN, MASKED, Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import GAP, Candidates, Commit, CommitDefaults

#: Progress (0 to 1) from which ``middle`` and ``late`` apply.
MIDDLE, LATE = 0.33, 0.67


@dataclass(frozen=True, kw_only=True)
class EarlyCommit(numbers.EarlyCommit, CommitDefaults):
    """Commit what is left once the answer's mean gap reaches ``early`` (then ``middle``, then ``late``); else ``base``.

    ``answer_start`` and ``answer_length`` define the answer's positions, relative to the first generated one; if
    confident, everything masked is committed. With a length of 0 the answer is the current block, and only the block is
    committed. With ``answer_after``, the answer is the ``answer_length`` positions after the first token at which
    consecutive final tokens spell that text; with a length of 0, the rest of the current block after it. Until the text
    is found, ``base`` decides. ``spell`` decodes tokens (int64 ``[n]``) to text.

    The mean is over the answer positions whose logits the pass has; all masked ones must be among them. An answer that
    was complete before the first pass never triggers. ``ends``: tokens that end an answer; positions after the first of
    them, final or proposed, are ignored. ``mistakes``: if above 0, replaces the mean: the answer is confident if at
    most so many masked positions are expected to be wrong, where a gap g makes the second candidate right with
    probability 1 / (1 + e^g). ``steps``: denoising steps for the whole canvas, used to compute progress; 0 = one token
    a step.
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
        """True with an answer region: it may lie in a later block, and what is committed may exceed the block."""
        return self.answer_length > 0 or self.base.whole_canvas

    @property
    def closes(self) -> bool:
        """The same as for ``base``."""
        return self.base.closes

    @property
    def reads(self) -> frozenset[str]:
        """The gap, and the values read by ``base``."""
        return self.base.reads | {GAP}

    def also_scored(self, canvas: Canvas) -> np.ndarray:
        """The answer's final positions, whose gaps are part of the mean."""
        start, end = (0, 0) if self.mistakes else self._region(canvas)
        return start + np.flatnonzero(canvas.committed_at[start:end] != MASKED)

    def needed(self, canvas: Canvas, positions: np.ndarray) -> np.ndarray:
        start, end = self._region(canvas)
        inside = (positions < canvas.block_end) | ((positions >= start) & (positions < end))
        return inside | self.base.whole_canvas

    def enough(self, canvas: Canvas, candidates: Candidates) -> bool:
        return not self.answer_length or not self._is_confident(canvas, candidates)

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        masked = canvas.committed_at[candidates.positions] == MASKED
        block = masked & (candidates.positions < canvas.block_end)
        if self._is_confident(canvas, candidates):
            return masked if self.answer_length else block
        eligible = masked if self.base.whole_canvas else block
        chosen = np.zeros_like(masked)
        chosen[eligible] = self.base.choose(canvas, candidates.where(eligible))
        return chosen

    def _is_confident(self, canvas: Canvas, candidates: Candidates) -> bool:
        masked = canvas.committed_at[candidates.positions] == MASKED
        start, end = self._region(canvas)
        end = self._end_of_answer(canvas, candidates.where(masked), start, end)
        region = (candidates.positions >= start) & (candidates.positions < end)
        # A region past the end of the canvas has no effect, nor one that was complete from the start, nor one with a
        # masked position that the recompute policy did not run in this pass.
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
        """The expected number of wrong tokens among candidates with these ``gaps`` (float64 ``[n]``)."""
        second = np.exp(-np.maximum(gaps, 0))
        return float((second / (1 + second)).sum())

    def _region(self, canvas: Canvas) -> tuple[int, int]:
        """The answer's first position, and the one after its last."""
        start = self._answer_begin(canvas) if self.answer_after else canvas.prompt_length + self.answer_start
        if not self.answer_length:
            return max(start if self.answer_after else 0, canvas.block_start), canvas.block_end
        start = min(start, canvas.size)
        return start, min(start + self.answer_length, canvas.size)

    def _end_of_answer(self, canvas: Canvas, candidates: Candidates, start: int, end: int) -> int:
        """The position after the first end of text in ``start`` to ``end``; ``end`` if there is none."""
        tokens = canvas.tokens.copy()
        tokens[candidates.positions] = candidates.tokens
        over = np.flatnonzero(np.isin(tokens[start:end], list(self.ends)))
        return start + int(over[0]) + 1 if len(over) else end

    def _answer_begin(self, canvas: Canvas) -> int:
        """The first position after the text ``answer_after``; ``canvas.size`` if it is not found."""
        final = canvas.committed_at[canvas.prompt_length :] != MASKED
        edges = np.flatnonzero(np.diff(np.concatenate([[False], final, [False]]))) + canvas.prompt_length
        for start, end in edges.reshape(-1, 2).tolist():
            length = self._length_through_text(canvas.tokens[start:end])
            if length is not None:
                return int(start) + length
        return canvas.size

    def _length_through_text(self, tokens: np.ndarray) -> int | None:
        """The length of the shortest prefix of ``tokens`` whose text contains ``answer_after``; None if there is
        none."""
        spell = self.spell
        if spell is None:
            raise ValueError("a text can only be looked for with a tokenizer")
        if self.answer_after not in spell(tokens):
            return None
        return bisect_left(range(len(tokens)), True, key=lambda size: self.answer_after in spell(tokens[:size]))

    def _needed(self, canvas: Canvas) -> float:
        progress = canvas.step / (self.steps or canvas.new_tokens)
        return self.early if progress < MIDDLE else self.middle if progress < LATE else self.late
