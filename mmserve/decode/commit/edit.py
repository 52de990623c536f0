"""LLaDA2.1's editing (inclusionAI/LLaDA2.1-mini; BlockRefinementScheduler in huggingface/diffusers).

Masked positions are committed by confidence; committed ones of the same block, except given ones, are replaced if the
model now prefers another token with enough confidence. A full block is run again until no token is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import GIVEN, MASKED, Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import Candidates, CommitDefaults


@dataclass(frozen=True)
class Edit(numbers.Edit, CommitDefaults):
    """Commit above ``confidence`` (and always the best one), replace above ``edit_confidence`` (both ``>``).

    ``passes``: maximum number of passes over a block after it is full.
    """

    @property
    def whole_canvas(self) -> bool:
        """False: blocks after the current one are not candidates."""
        return False

    @property
    def revises(self) -> bool:
        """True."""
        return True

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        since = canvas.committed_at[candidates.positions]
        masked, given = since == MASKED, since == GIVEN
        # a threshold beyond fp32 would warn; no score exceeds 2
        chosen = masked & (candidates.confidence > min(self.confidence, 2.0))
        if masked.any() and not chosen.any():
            chosen[np.argmax(np.where(masked, candidates.confidence, -1.0))] = True
        other = candidates.tokens != canvas.tokens[candidates.positions]
        return chosen | (~masked & ~given & other & (candidates.confidence > min(self.edit_confidence, 2.0)))

    def is_final(self, canvas: Canvas, edited: int) -> bool:
        return canvas.full_passes >= self.passes or (edited == 0 and canvas.full_passes > 0)
