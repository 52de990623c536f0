"""The PyTorch reference of ``attention_scores``.

Shapes in names: T query rows of all requests, R of one, P pages, S positions a page, H query heads, G key/value heads,
K head size, L positions of a request, N positions of all requests, one request after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmserve_kernels.cached_attention import Ragged

#: Scores in fp32 that are held at once.
_SLICE_ELEMENTS = 1 << 20


def attention_scores(q_THK: Tensor, k_PSGK: Tensor, ragged: Ragged, *, lse_TH: Tensor | None = None) -> Tensor:
    """Sums of each column of the attention matrix, fp32 ``[N, H]``: over a request's rows, the weight that a head gives
    to each of the request's positions.

    With one row a request that row itself: the attention of a class token (FasterVLM, arXiv 2412.01818), or of a
    prompt's last one. With a page for each image, ``S`` its tokens, keys need not lie in a store's pages. ``lse_TH``
    (fp32) is the log-sum-exp of each row's scaled scores, where ``cached_attention`` has left it; without it, it is
    computed. Memory grows with N, not with T · N. Rows that see nothing count for nothing.
    """
    out = torch.zeros(sum(ragged.kv_lengths), q_THK.shape[1], device=q_THK.device)
    row = position = 0
    for rows, length, pages in zip(ragged.row_counts, ragged.kv_lengths, ragged.page_tables, strict=True):
        k_LGK = k_PSGK.index_select(0, pages).flatten(0, 1)[:length].float()
        step = max(1, _SLICE_ELEMENTS // (length * q_THK.shape[1] or 1))
        for start in range(row, row + rows, step):
            here = slice(start, min(start + step, row + rows))
            limit = None if ragged.kv_limit is None else ragged.kv_limit[here]
            summed = weights(q_THK[here], k_LGK, limit, None if lse_TH is None else lse_TH[here])
            out[position : position + length] += summed.sum(1).T
        row += rows
        position += length
    return out


def weights(q_RHK: Tensor, k_LGK: Tensor, limit_R: Tensor | None, lse_RH: Tensor | None) -> Tensor:
    """Attention ``[H, R, L]`` in fp32."""
    q_GRUK = q_RHK.float().unflatten(1, (k_LGK.shape[1], -1)).transpose(0, 1)
    scores = torch.einsum("gruk,lgk->gurl", q_GRUK, k_LGK).flatten(0, 1) * q_RHK.shape[-1] ** -0.5
    if limit_R is not None:
        unseen = torch.arange(len(k_LGK), device=k_LGK.device) >= limit_R[:, None]
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(-1) if lse_RH is None else lse_RH.T
    return (scores - torch.where(lse == -torch.inf, 0.0, lse)[:, :, None]).exp()
