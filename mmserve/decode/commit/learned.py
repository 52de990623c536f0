"""Learn2PD and EoTP (arXiv 2509.25188), with a filter for blocks of any length that treats final positions as certain.

As in ims-kdks/Learning-to-Parallel-Decoding (``generate_l2p_eot`` of ``generate.py``), with three differences. Its
filter takes the confidences of a block of 32 positions, including those of final positions; these are not computed
here, and count as 1. It truncates the canvas at the most probable candidate for an end of text, even if not accepted,
which can truncate an answer; here only accepted ends count. And it removes positions after an end; here they become
padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import BlockWise, Candidates, most_confident
from mmserve.decode.pace import tokens_of_step
from mmserve.models.commit_filter import CommitFilter


@dataclass(frozen=True, kw_only=True)
class Learned(numbers.Learned, BlockWise):
    """Commits all candidates that the filter scores above ``threshold`` (``>``), and at least as many as the schedule
    gives.

    The filter belongs to the model: from the confidences of a block it predicts which candidates equal the schedule's
    final tokens. With a ``threshold`` of 1 or more, this is ``low_confidence``.

    ``end_of_text`` (EoTP): when an end of text becomes final, everything right of it becomes padding. The text would
    have ended there anyway. Final tokens do not change, but open positions left of the end may get other tokens than
    without it, because they then attend to padding after the end, as in training, instead of masks.
    """

    commit_filter: CommitFilter
    steps: int = 0

    @property
    def closes(self) -> bool:
        """The same as ``end_of_text``."""
        return self.end_of_text

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        trust = self.commit_filter.trust(*block_confidence(canvas, candidates))
        # a threshold beyond fp32 would warn; no score exceeds 2
        trusted = trust[candidates.positions - canvas.block_start] > min(self.threshold, 2.0)
        count = tokens_of_step(canvas, self.steps, canvas.block_step - 1)
        return trusted | most_confident(candidates, count)


def block_confidence(canvas: Canvas, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """A filter's inputs for the current block: confidence (fp32) and openness (bool) of each position.

    Final positions have confidence 1; open ones that this pass did not run have 0.
    """
    still_open = canvas.committed_at[canvas.block_start : canvas.block_end] == MASKED
    confidence = np.where(still_open, np.float32(0), np.float32(1))
    confidence[candidates.positions - canvas.block_start] = candidates.confidence
    return confidence, still_open
