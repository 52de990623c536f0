"""A discrete scheduler of diffusers as a commit policy: it draws the tokens, and chooses which become final.

Its steps are those of one whole block, as in diffusers' ``LLaDA2Pipeline``: a first block that begins within the prompt
is filled at the same rate as any other. It reads only the logits of the block's open part. If it accepts no masked
position, its most probable token is committed anyway. Given tokens are not replaced. Its candidates are exactly the
tokens that it commits or replaces; a constrained request commits its witness's tokens at these positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.canvas import GIVEN, Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit.base import BlockWise, Candidates, LogitsObserver
from mmserve.decode.pace import steps_of_whole_block
from mmserve.decode.sampler import candidates_of, step_generator
from mmserve.decode.schedulers import Discrete

#: Maximum number of passes over a full block, if the scheduler edits (``max_post_steps`` of diffusers' LLaDA2Pipeline).
PASSES = 16


@dataclass(frozen=True)
class Scheduled(BlockWise):
    """``steps``: the request's denoising steps for the whole canvas; 0 = the scheduler's own number for each block."""

    scheduler: Discrete
    steps: int = 0

    @property
    def whole_block(self) -> bool:
        """True: a scheduler's sample is the whole block."""
        return True

    @property
    def revises(self) -> bool:
        """Whether the scheduler is configured to edit."""
        return self.scheduler.edits

    def is_final(self, canvas: Canvas, edited: int) -> bool:
        if not self.revises:
            return True
        return canvas.full_passes >= PASSES or (edited == 0 and canvas.full_passes > 0)

    def propose(
        self,
        logits_nV: Tensor,
        canvas: Canvas,
        sampling: Sampling,
        mask_id: int,
        banned: tuple[int, ...],
        observer: LogitsObserver | None = None,
    ) -> Candidates:
        """The positions and tokens that the scheduler changes in the block, from the logits of all its positions."""
        logits = logits_nV.float().clone()
        logits[:, list(banned)] = -torch.inf
        if observer is not None:
            observer.restrict(logits)
            observer.take(logits, torch.logsumexp(logits, -1), None, None)
        positions = canvas.block()
        sample = torch.from_numpy(canvas.tokens[positions]).to(logits.device)
        out = self.scheduler.step(
            logits,
            sample,
            canvas.block_step,
            steps=steps_of_whole_block(canvas, self.steps) if self.steps else self.scheduler.steps,
            block_length=canvas.block_length,
            mask_id=mask_id,
            sampling=sampling,
            generator=step_generator(sampling.seed, canvas.step + 1, logits.device),
        )
        tokens, open_L = out.prev_sample[0].clone(), sample == mask_id
        if bool(open_L.any()) and not bool((open_L & (tokens != sample)).any()):
            surest = torch.where(open_L, out.sampled_probs[0].float(), -1.0).argmax()
            tokens[surest] = out.sampled_tokens[0, surest]
        edited = torch.from_numpy(self.revises & (canvas.committed_at[positions] != GIVEN)).to(logits.device)
        changed = (tokens != sample) & (open_L | edited)
        return candidates_of(logits[changed], positions[changed.cpu().numpy()], tokens[changed])

    def choose(self, canvas: Canvas, candidates: Candidates) -> np.ndarray:
        return np.ones(len(candidates.positions), dtype=bool)
