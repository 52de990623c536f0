"""The PyTorch reference of ``commit_scores``, and the path on a CPU.

Shapes in names: n rows, r rows of a slice, V tokens of the vocabulary, k best tokens, b banned ones, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mmserve_kernels.commit_scores.noise import gumbel

#: The most best tokens of a row that may be asked for.
LARGEST_K = 64
#: Temperatures below this are greedy: dividing by them would leave the range of fp32.
GREEDY_BELOW = 1e-4
#: Elements of a slice in fp32: 1 MiB, which stays in a core's cache.
_SLICE_ELEMENTS = 1 << 18
#: Tokens whose best is found before the best of all: a group that holds none of those is not looked at twice.
_GROUP = 64
#: Exponentials below this are nothing, and the number is small enough to be multiplied with nothing.
_NOTHING = -1e4


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
    """What logits say of each row. Where a row has no token left, the id is -1 and its log-probability -inf."""

    ids: Tensor  # int64 [n, k], best first; equals by id
    log_probs: Tensor  # fp32 [n, k]
    gap: Tensor  # fp32 [n], the best logit less the second; inf if there is no second
    entropy: Tensor  # fp32 [n], nats
    tokens: Tensor  # int64 [n], drawn, or the best
    token_log_probs: Tensor  # fp32 [n]


def commit_scores(
    logits_nV: Tensor,
    k: int = 1,
    *,
    banned: Tensor | None = None,
    allowed: Tensor | None = None,
    draw: Draw | None = None,
) -> CommitScores:
    """The best tokens, log-probabilities, gap, entropy and a drawn token of each row of logits (fp32, fp16 or bf16).

    ``banned`` (int64 ``[b]``, ids of the vocabulary) may stand in no row; ``allowed`` (int32 ``[n, ceil(V / 32)]``, bit
    i of word j for token 32 j + i) says what may stand in each. Probabilities are among what is left. A logit that is
    no number is one of -inf, and +inf the largest number. A row is drawn by Gumbel-max with noise of its seed and the
    token's id (``noise.py``): the token is the same on every device that is given the same logits. Nothing of a row
    depends on the others, and no temporary is larger than a slice of rows.

    Raises ValueError where shapes, dtypes or ``k`` do not fit.
    """
    check(logits_nV, k, banned, allowed, draw)
    vocabulary = logits_nV.shape[1]
    padded = -(-vocabulary // _GROUP) * _GROUP
    step = max(1, _SLICE_ELEMENTS // padded)
    parts = []
    for start in range(0, len(logits_nV), step):
        rows = slice(start, start + step)
        part = logits_nV[rows]
        x = torch.full((len(part), padded), -torch.inf, device=part.device)
        x[:, :vocabulary] = part
        x[:, :vocabulary].nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        if banned is not None:
            x[:, banned] = -torch.inf
        if allowed is not None:
            x[:, :vocabulary].masked_fill_(~_bits(allowed[rows], vocabulary), -torch.inf)
        tokens = None
        if draw is not None:
            inverse, loud = draw.inverse()[rows, None], draw.noise()[rows, None]
            noise = gumbel(draw.seeds[rows], padded).mul_(loud)
            if draw.shaped:
                x.mul_(inverse).clamp_max_(torch.finfo(x.dtype).max)
                tokens = noise.add_(x).argmax(-1)
            else:
                tokens = noise.add_(x * inverse).argmax(-1)
        parts.append(_scores(x, k, tokens))
    if not parts:
        return empty(0, k, logits_nV.device)
    return CommitScores(*(torch.cat(figures) for figures in zip(*parts, strict=True)))


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


def _bits(words_rW: Tensor, vocabulary: int) -> Tensor:
    """Boolean ``[r, V]`` of a mask's words."""
    shifts = torch.arange(32, dtype=torch.int32, device=words_rW.device)
    return (words_rW[:, :, None] >> shifts & 1).flatten(1)[:, :vocabulary].bool()


def _scores(x: Tensor, k: int, tokens: Tensor | None) -> tuple[Tensor, ...]:
    """Fields of ``CommitScores`` of logits ``x`` (fp32 ``[r, whole groups]``, changed)."""
    values, ids = _best(x, max(k, 2))
    if tokens is None:
        tokens, drawn = ids[:, 0], values[:, 0]
    else:
        drawn = x.gather(-1, tokens[:, None])[:, 0]
        tokens = torch.where(drawn == -torch.inf, -1, tokens)
    best = values[:, :1]
    nothing = best == -torch.inf
    best = torch.where(nothing, 0.0, best)
    x.sub_(best).clamp_min_(_NOTHING)
    weights = x.exp()
    # Sums of groups first: a row alone and on several threads would otherwise be summed in another order.
    total = weights.unflatten(-1, (-1, _GROUP)).sum(-1).sum(-1, keepdim=True)
    moment = weights.mul_(x).unflatten(-1, (-1, _GROUP)).sum(-1).sum(-1, keepdim=True)
    total = torch.where(nothing, 1.0, total)
    log_z = best + total.log()
    return (
        ids[:, :k],
        values[:, :k] - log_z,
        torch.where(nothing[:, 0], 0.0, values[:, 0] - values[:, 1]),
        torch.where(nothing, 0.0, total.log() - moment / total)[:, 0],
        tokens,
        drawn - log_z[:, 0],
    )


def _best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row ``[r, whole groups]``, and their places (-1 where -inf), equals by place."""
    groups = x.unflatten(-1, (-1, _GROUP))
    count = groups.shape[1]
    places = torch.arange(count, device=x.device)
    chosen = _ordered(groups.amax(-1), places).topk(min(k, count)).indices
    near = groups.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    ids = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP, device=x.device)).flatten(1)
    at = _ordered(near, ids).topk(k).indices
    values = near.gather(-1, at)
    return values, torch.where(values == -torch.inf, -1, ids.gather(-1, at))


def _ordered(values: Tensor, places: Tensor) -> Tensor:
    """int64 keys that sort as ``values`` (fp32) do, and equal ones the lower place first."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | (0x7FFFFFFF - places)
