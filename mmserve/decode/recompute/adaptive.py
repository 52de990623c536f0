"""dLLM-Cache (arXiv 2506.06295), with one selection of positions for all layers, where dLLM-Cache has one for each.

As in maomaocun/dLLM-cache (``dllm_cache/hooks/cache_hook_LLaDA.py``), the prompt runs every ``prompt_refresh`` steps
and the response every ``response_refresh``; in other steps only the share of the response whose value vectors have the
lowest cosine similarity with the stored ones. The reference compares values in each layer after the first, after
running the whole response through the layer before, and caches attention and MLP outputs; here values are compared
once, at the second layer, the selected positions run through all layers, and keys and values are cached. Two kinds of
positions run in addition: the block's masked ones, because only positions that run can be committed, and those
committed in the last step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.policies import recompute as numbers
from mmserve.core.values import Checked


@dataclass(frozen=True)
class Adaptive(numbers.Adaptive, Checked):
    """Intervals in steps (K_p 100 and K_r 7 in the reference's demo for LLaDA), and rho, the share of the response that
    runs in other steps."""

    def watched(self, canvas: Canvas) -> np.ndarray:
        if canvas.step % self.response_refresh == 0:
            return canvas.tokens[:0]
        return np.arange(canvas.prompt_length, canvas.size)

    def rows(self, canvas: Canvas, changes: np.ndarray | None = None) -> np.ndarray:
        chosen = np.zeros(canvas.size, dtype=bool)
        chosen[: canvas.prompt_length] = canvas.step % self.prompt_refresh == 0
        response = slice(canvas.prompt_length, canvas.size)
        if changes is None or canvas.step % self.response_refresh == 0:
            chosen[response] = True
            return np.flatnonzero(chosen)
        count = int(self.ratio * canvas.new_tokens)
        chosen[canvas.prompt_length + np.argsort(-changes, kind="stable")[:count]] = True
        chosen[canvas.block_masked()] = True
        chosen |= (canvas.committed_at == canvas.step) & (canvas.committed_at != MASKED)
        return np.flatnonzero(chosen)
