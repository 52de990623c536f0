"""The kernel ``commit_scores`` for the sampler: no copy of the logits, and counter-based noise.

Its noise is a function of a seed and a token id (``mmserve_kernels/commit_scores/noise.py``), so each row has its own
seed, and no noise is drawn for rows that are not needed. It differs from the noise of the CPU sampler, which is
sequential.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from mmserve_kernels.commit_scores import CommitScores, Draw
from mmserve_kernels.commit_scores.noise import gumbel
from mmserve_kernels.dispatch import pick
from torch import Tensor

from mmserve.core.canvas import Canvas
from mmserve.decode.commit.base import ENTROPY, GAP
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel

#: Runs ``commit_scores``: its reference or its kernel.
Scores = Callable[..., CommitScores]
#: Odd multipliers that map (seed, step, row) to 64-bit seeds.
_SEED_MIX, _STEP_MIX, _ROW_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def scores_for(model: LoadedModel, store: KVStore) -> Scores | None:
    """The kernel for logits of ``model``; None if there is none, and the sampler uses PyTorch operations.

    ``store.kernels`` selects the implementation.
    """
    op = pick("commit_scores", store.device, model.dtype)
    store.kernels[op.op] = op.path
    return op.run if op.path == "triton" else None


class CounterNoise:
    """The Gumbel noise of one step, a function of seed, step, and a row's offset from the block's first position."""

    def __init__(self, canvas: Canvas, seed: int) -> None:
        self._step = np.uint64((seed * _SEED_MIX + (canvas.step + 1) * _STEP_MIX) % (1 << 64))

    def draw(self, offsets: np.ndarray, temperature: float, device: torch.device) -> Draw:
        """The seeds and temperature for drawing the tokens of rows at ``offsets``."""
        return Draw(self._seeds(offsets, device), torch.full((len(offsets),), temperature, device=device))

    def rows(self, offsets: np.ndarray, vocabulary: int, device: torch.device) -> Tensor:
        """The noise of rows at ``offsets``, fp32 ``[n, vocabulary]``."""
        return gumbel(self._seeds(offsets, device), vocabulary)

    def _seeds(self, offsets: np.ndarray, device: torch.device) -> Tensor:
        mixed = offsets.astype(np.uint64) * np.uint64(_ROW_MIX) + self._step
        return torch.from_numpy(mixed.view(np.int64)).to(device)


def scored(
    scores: Scores,
    logits_nV: Tensor,
    banned: tuple[int, ...],
    draw: Draw | None,
    reads: frozenset[str],
    mask_id: int | None = None,
) -> tuple[Tensor | None, ...]:
    """Tokens, confidence, gap and entropy ``[n]`` of the rows, greedy without a ``draw``; the last two None unless in
    ``reads``.

    ``mask_id``: see ``sampler.candidates``. If all logits of a row are NaN, its token is 0, with no confidence.
    """
    found = scores(logits_nV, banned=_ids(banned, logits_nV.device), draw=draw, mask_id=mask_id)
    gap, entropy = (found.gap if GAP in reads else None), (found.entropy if ENTROPY in reads else None)
    return found.tokens.clamp_min(0), found.token_log_probs.exp(), gap, entropy


@lru_cache(maxsize=16)
def _ids(banned: tuple[int, ...], device: torch.device) -> Tensor:
    """``banned`` as a tensor, cached on the device because every step uses the same ids."""
    return torch.tensor(banned, dtype=torch.int64, device=device)
