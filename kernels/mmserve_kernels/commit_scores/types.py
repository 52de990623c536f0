"""What ``commit_scores`` takes and returns.

Shapes in names: n rows, V tokens of the vocabulary, k best tokens, b banned ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

#: The most best tokens of a row that may be asked for.
LARGEST_K = 64
#: Temperatures below this are greedy: dividing by them would leave the range of fp32.
GREEDY_BELOW = 1e-4


@dataclass(frozen=True)
class Draw:
    """How rows draw a token: ``seeds`` int64 ``[n]``, ``temperatures`` fp32 ``[n]`` (below 1e-4: greedy).

    ``shaped``: whether probabilities, gap and entropy are those of the tempered logits too (DiffusionGemma), or of the
    logits as they are (LLaDA).
    """

    seeds: Tensor
    temperatures: Tensor
    shaped: bool = False

    def inverse(self) -> Tensor:
        """What logits are multiplied with, fp32 ``[n]``: 1 in greedy rows."""
        return torch.where(self.temperatures < GREEDY_BELOW, 1.0, self.temperatures).reciprocal()

    def noise(self) -> Tensor:
        """What noise is multiplied with, fp32 ``[n]``: 0 in greedy rows, otherwise 1."""
        return (self.temperatures >= GREEDY_BELOW).float()


@dataclass(frozen=True)
class CommitScores:
    """The candidate of each row of logits. Where a row has no token left, the id is -1 and its log-probability -inf."""

    ids: Tensor  # int64 [n, k], best first; equals by id
    log_probs: Tensor  # fp32 [n, k]
    gap: Tensor  # fp32 [n], the best logit less the second; inf if there is no second
    entropy: Tensor  # fp32 [n], nats
    tokens: Tensor  # int64 [n], drawn, or the best
    token_log_probs: Tensor  # fp32 [n]


def empty(rows: int, k: int, device: torch.device) -> CommitScores:
    """Room for the scores of ``rows`` rows."""
    whole = partial(torch.empty, dtype=torch.int64, device=device)
    real = partial(torch.empty, dtype=torch.float32, device=device)
    return CommitScores(whole(rows, k), real(rows, k), real(rows), real(rows), whole(rows), real(rows))


def check(logits_nV: Tensor, k: int, banned: Tensor | None, allowed: Tensor | None, draw: Draw | None) -> None:
    """Raise ValueError unless the arguments of ``commit_scores`` fit one another."""
    if logits_nV.ndim != 2 or logits_nV.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"logits must be fp32, fp16 or bf16 [n, V], not {logits_nV.dtype} {tuple(logits_nV.shape)}")
    rows, vocabulary = logits_nV.shape
    if not 1 <= k <= min(LARGEST_K, vocabulary):
        raise ValueError(f"k must be 1 to {min(LARGEST_K, vocabulary)}, not {k}")
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
