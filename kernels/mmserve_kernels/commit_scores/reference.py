"""The specification of ``commit_scores``, one figure after another, in plain PyTorch.

Shapes in names: n rows, V tokens of the vocabulary, k best tokens, b banned ones, W words of a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.commit_scores.noise import gumbel
from mmserve_kernels.commit_scores.types import CommitScores, Draw, check


def commit_scores(
    logits_nV: Tensor,
    k: int = 1,
    *,
    banned: Tensor | None = None,
    allowed: Tensor | None = None,
    draw: Draw | None = None,
) -> CommitScores:
    """The best tokens, log-probabilities, gap, entropy and a drawn token of each row of logits (fp32, fp16 or bf16).

    ``banned`` (int64 ``[b]``, ids of the vocabulary) are in no row; ``allowed`` (int32 ``[n, ceil(V / 32)]``, bit
    i of word j for token 32 j + i): tokens allowed in each. Probabilities are among what is left. A logit that is
    no number is one of -inf, and +inf the largest number. A row is drawn by Gumbel-max with noise of its seed and the
    token's id (``noise.py``): the token is the same on every device that is given the same logits. Nothing of a row
    depends on the others.

    Raises ValueError where shapes, dtypes or ``k`` do not fit.
    """
    check(logits_nV, k, banned, allowed, draw)
    vocabulary, largest = logits_nV.shape[1], torch.finfo(torch.float32).max
    x_nV = logits_nV.float().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    if banned is not None:
        x_nV = x_nV.index_fill(1, banned, -torch.inf)
    if allowed is not None:
        x_nV = x_nV.masked_fill(~_bits(allowed, vocabulary), -torch.inf)
    tempered_nV = x_nV if draw is None else x_nV * draw.inverse()[:, None]
    if draw is not None and draw.shaped:
        x_nV = tempered_nV = tempered_nV.clamp_max(largest)
    log_p_nV = x_nV.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # of no token left: -inf
    values_nV, ids_nV = x_nV.sort(dim=-1, descending=True, stable=True)
    log_probs = log_p_nV.gather(1, ids_nV)
    ids_nV = torch.where(values_nV == -torch.inf, -1, ids_nV)
    second = F.pad(values_nV, (0, 1), value=-torch.inf)[:, 1]
    tokens, token_log_probs = ids_nV[:, 0], log_probs[:, 0]
    if draw is not None:
        tokens = (tempered_nV + gumbel(draw.seeds, vocabulary) * draw.noise()[:, None]).argmax(-1)
        token_log_probs = log_p_nV.gather(1, tokens[:, None])[:, 0]
        tokens = torch.where(token_log_probs == -torch.inf, -1, tokens)
    return CommitScores(
        ids_nV[:, :k],
        log_probs[:, :k],
        torch.where(ids_nV[:, 0] < 0, 0.0, values_nV[:, 0] - second),
        torch.special.entr(log_p_nV.exp()).sum(-1),
        tokens,
        token_log_probs,
    )


def _bits(words_nW: Tensor, vocabulary: int) -> Tensor:
    """Boolean ``[n, V]`` of a mask's words."""
    shifts = torch.arange(32, dtype=torch.int32, device=words_nW.device)
    return (words_nW[:, :, None] >> shifts & 1).flatten(1)[:, :vocabulary].bool()
