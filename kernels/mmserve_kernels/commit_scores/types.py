"""Inputs and outputs of ``commit_scores``.

Shapes in names: n rows, V tokens of the vocabulary, k best tokens, b banned ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

#: Maximum k of the top-k tokens.
LARGEST_K = 64
#: Temperatures below this are greedy: dividing by them would overflow fp32.
GREEDY_BELOW = 1e-4


@dataclass(frozen=True)
class Draw:
    """Sampling of rows: ``seeds`` int64 ``[n]``, ``temperatures`` fp32 ``[n]`` (below 1e-4: greedy).

    ``shaped``: whether probabilities, gap and entropy are those of the logits after temperature (DiffusionGemma), or of
    the raw logits (LLaDA).
    """

    seeds: Tensor
    temperatures: Tensor
    shaped: bool = False

    def inverse(self) -> Tensor:
        """The factor of logits, fp32 ``[n]``: 1 in greedy rows, else 1 / temperature."""
        return torch.where(self.temperatures < GREEDY_BELOW, 1.0, self.temperatures).reciprocal()

    def noise(self) -> Tensor:
        """The factor of the noise, fp32 ``[n]``: 0 in greedy rows, else 1."""
        return (self.temperatures >= GREEDY_BELOW).float()


@dataclass(frozen=True)
class CommitScores:
    """The candidates of each row of logits. In a row without allowed tokens, ids are -1 and log-probabilities -inf."""

    ids: Tensor  # int64 [n, k], best first; ties by id
    log_probs: Tensor  # fp32 [n, k]
    gap: Tensor  # fp32 [n], difference of the top two logits; inf if there is only one
    entropy: Tensor  # fp32 [n], nats
    tokens: Tensor  # int64 [n], sampled or top-1
    token_log_probs: Tensor  # fp32 [n]


def empty(rows: int, k: int, device: torch.device) -> CommitScores:
    """Uninitialized ``CommitScores`` of ``rows`` rows."""
    whole = partial(torch.empty, dtype=torch.int64, device=device)
    real = partial(torch.empty, dtype=torch.float32, device=device)
    return CommitScores(whole(rows, k), real(rows, k), real(rows), real(rows), whole(rows), real(rows))


def check(
    logits_nV: Tensor,
    k: int,
    banned: Tensor | None,
    allowed: Tensor | None,
    draw: Draw | None,
    mask_id: int | None = None,
) -> None:
    """Raise ``ValueError`` if the arguments of ``commit_scores`` are inconsistent."""
    if logits_nV.ndim != 2 or logits_nV.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"logits must be fp32, fp16 or bf16 [n, V], not {logits_nV.dtype} {tuple(logits_nV.shape)}")
    rows, vocabulary = logits_nV.shape
    if not 1 <= k <= min(LARGEST_K, vocabulary):
        raise ValueError(f"k must be 1 to {min(LARGEST_K, vocabulary)}, not {k}")
    if mask_id is not None and not 0 <= mask_id < vocabulary:
        raise ValueError(f"mask_id must be a token from 0 to {vocabulary - 1}, not {mask_id}")
    if banned is not None and (banned.ndim != 1 or banned.dtype != torch.int64):
        raise ValueError(f"banned must be int64 [b], not {banned.dtype} {tuple(banned.shape)}")
    if allowed is not None and (allowed.shape != (rows, -(-vocabulary // 32)) or allowed.dtype != torch.int32):
        raise ValueError(f"allowed must be int32 [n, ceil(V / 32)], not {allowed.dtype} {tuple(allowed.shape)}")
    if draw is not None:
        for name, tensor, dtype in (
            ("seeds", draw.seeds, torch.int64),
            ("temperatures", draw.temperatures, torch.float32),
        ):
            if tensor.shape != (rows,) or tensor.dtype != dtype:
                raise ValueError(f"{name} must be {dtype} [n], not {tensor.dtype} {tuple(tensor.shape)}")
