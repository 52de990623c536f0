"""The specification of ``commit_scores`` in plain PyTorch, one output after another.

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
    mask_id: int | None = None,
) -> CommitScores:
    """Top-k tokens, log-probabilities, gap, entropy and a sampled token of each row of logits (fp32, fp16 or bf16).

    ``banned`` (int64 ``[b]``, token ids) are excluded in all rows; ``allowed`` (int32 ``[n, ceil(V / 32)]``, bit i of
    word j for token 32 j + i) is a bitmask of the tokens allowed in each row. Probabilities are renormalized over the
    remaining tokens. ``mask_id`` is never chosen either, but is part of that distribution, like the mask in the softmax
    of LLaDA's ``generate.py``; where its logit is the highest, the gap is negative.

    NaN logits count as -inf, and +inf as the largest number. Tokens are sampled by Gumbel-max with noise from the row's
    seed and the token's id (``noise.py``): the sampled token is the same on every device with equal logits. Rows are
    independent of each other.

    Raises ``ValueError`` if shapes, dtypes or ``k`` are invalid.
    """
    check(logits_nV, k, banned, allowed, draw, mask_id)
    vocabulary, largest = logits_nV.shape[1], torch.finfo(torch.float32).max
    x_nV = logits_nV.float().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    mask_n1 = None if mask_id is None else x_nV[:, mask_id : mask_id + 1].clone()
    if banned is not None:
        x_nV = x_nV.index_fill(1, banned, -torch.inf)
    if mask_id is not None:
        x_nV[:, mask_id] = -torch.inf
    if allowed is not None:
        x_nV = x_nV.masked_fill(~_bits(allowed, vocabulary), -torch.inf)
    tempered_nV = x_nV if draw is None else x_nV * draw.inverse()[:, None]
    if draw is not None and draw.shaped:
        x_nV = tempered_nV = tempered_nV.clamp_max(largest)
        mask_n1 = None if mask_n1 is None else (mask_n1 * draw.inverse()[:, None]).clamp_max(largest)
    whole_nV = x_nV if mask_n1 is None else torch.cat([x_nV, mask_n1], 1)
    log_p_nV = whole_nV.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)  # -inf if no token is left
    values_nV, ids_nV = x_nV.sort(dim=-1, descending=True, stable=True)
    log_probs = log_p_nV.gather(1, ids_nV)
    ids_nV = torch.where(values_nV == -torch.inf, -1, ids_nV)
    second = F.pad(values_nV, (0, 1), value=-torch.inf)[:, 1]
    if mask_n1 is not None:
        second = torch.maximum(second, mask_n1[:, 0])
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
    """Boolean ``[n, V]`` of a bitmask's words."""
    shifts = torch.arange(32, dtype=torch.int32, device=words_nW.device)
    return (words_nW[:, :, None] >> shifts & 1).flatten(1)[:, :vocabulary].bool()
