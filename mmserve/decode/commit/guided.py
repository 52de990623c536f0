"""Guided Diffusion (arXiv 2505.21467): a diffusion model drafts the block, an autoregressive model verifies it.

The draft is kept up to the first token that the verifier rejects; there the verifier's own token is taken, and
everything after it is drafted again. A token is accepted if it is the verifier's own choice (the paper's
``deterministic``: the answer is then the verifier's own, in fewer passes), or if it is probable enough relative to that
choice (``topk_relative``). The paper verifies the canvas in chunks of 32; here a chunk is the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import Canvas
from mmserve.core.policies import commit as numbers
from mmserve.decode.commit.base import BlockWise, Candidates, Verdict, leading


@dataclass(frozen=True)
class Guided(numbers.Guided, BlockWise):
    """Accepts drafted tokens among the verifier's ``top_k`` that are at least ``ratio`` (``>=``) times as probable as
    its first choice; with ``top_k`` 0, only the verifier's own choices."""

    def verified(self, canvas: Canvas, candidates: Candidates, verdict: Verdict) -> Candidates:
        count = len(verdict.rank)
        if self.top_k:
            agreed = (verdict.rank < self.top_k) & (verdict.relative >= self.ratio)
        else:
            agreed = candidates.tokens[:count] == verdict.own.tokens[:count]
        kept = leading(agreed)
        draft = candidates.where(np.arange(len(candidates.positions)) < kept)
        return draft.and_then(verdict.own.where(np.arange(len(verdict.own.positions)) == kept))

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return np.ones(len(candidates.positions), dtype=bool)
