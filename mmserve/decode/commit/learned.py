"""Learn2PD and EoTP (arXiv 2509.25188) by a filter for blocks of any length, which takes final positions as certain.

As in ims-kdks/Learning-to-Parallel-Decoding (``generate_l2p_eot`` of ``generate.py``), but for three things. Its filter
takes the confidences of a block of 32 positions, those of final positions among them, which are not computed here: they
count as 1. It cuts the canvas at the most probable candidate for an end of text, accepted or not, which may cut an
answer short: here only ends that are accepted count. And it removes what follows an end; here that becomes padding.
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
    """All candidates that the filter trusts more than ``threshold`` (``>``), and as many as the schedule gives.

    The filter belongs to the model: from the confidences of a block it predicts which candidates are those that the
    schedule alone would end with. A ``threshold`` of 1 or more leaves the schedule's: ``low_confidence``.

    ``end_of_text`` (EoTP): with an end of text that becomes final everything right of it does too, as padding. The text
    would have ended there anyway. Nothing final changes by it, but what is still open left of the end may become other
    tokens than without it: from then on it sees there what a model is trained to find after an end, and no masks.
    """

    commit_filter: CommitFilter
    steps: int = 0

    @property
    def closes(self) -> bool:
        """With ``end_of_text``."""
        return self.end_of_text

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        trust = self.commit_filter.trust(*block_confidence(canvas, candidates))
        # a number past fp32 would warn, and no trust passes 2 either
        trusted = trust[candidates.positions - canvas.block_start] > min(self.threshold, 2.0)
        count = tokens_of_step(canvas, self.steps, canvas.block_step - 1)
        return trusted | most_confident(candidates, count)


def block_confidence(canvas: Canvas, candidates: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """What a filter sees of the current block: confidence (fp32) and openness (bool) of each of its positions.

    Final positions have a confidence of 1, open ones that were not run this time 0.
    """
    still_open = canvas.committed_at[canvas.block_start : canvas.block_end] == MASKED
    confidence = np.where(still_open, np.float32(0), np.float32(1))
    confidence[candidates.positions - canvas.block_start] = candidates.confidence
    return confidence, still_open
