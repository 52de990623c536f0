"""The PyTorch reference of ``attention_scores``.

Shapes in names: T query rows of all requests, R of one, P pages, S positions a page, H query heads, G key/value heads,
K head size, L positions of a request, N positions of all requests, one request after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmserve_kernels.cached_attention import Ragged

#: Maximum number of fp32 scores in memory at once.
_SLICE_ELEMENTS = 1 << 20


def attention_scores(q_THK: Tensor, k_PSGK: Tensor, ragged: Ragged, *, lse_TH: Tensor | None = None) -> Tensor:
    """Column sums of the attention matrix, fp32 ``[N, H]``: for each head, the total weight that a request's rows give
    to each of the request's positions.

    With one row a request, that row's weights: the attention of a class token (FasterVLM, arXiv 2412.01818), or of a
    prompt's last token. Keys outside a page pool can be passed as one page an image, with ``S`` its tokens. ``lse_TH``
    (fp32) is the log-sum-exp of each row's scaled scores, as computed by ``cached_attention``; None = compute it.
    Memory grows with N, not with T · N. Rows with no visible position contribute nothing.
    """
    out = torch.zeros(sum(ragged.kv_lengths), q_THK.shape[1], device=q_THK.device)
    row = position = 0
    requests = zip(ragged.row_counts, ragged.kv_lengths, ragged.page_tables, ragged.runs, strict=True)
    for rows, length, pages, first in requests:
        k_LGK = _keys(k_PSGK, pages, first)[:length].float()
        step = max(1, _SLICE_ELEMENTS // (length * q_THK.shape[1] or 1))
        for start in range(row, row + rows, step):
            here = slice(start, min(start + step, row + rows))
            limit = None if ragged.kv_limit is None else ragged.kv_limit[here]
            summed = weights(q_THK[here], k_LGK, limit, None if lse_TH is None else lse_TH[here])
            out[position : position + length] += summed.sum(1).T
        row += rows
        position += length
    return out


def _keys(k_PSGK: Tensor, pages: Tensor, first: int | None) -> Tensor:
    """Keys ``[positions, G, K]`` of ``pages``; a view if the pages are contiguous from page ``first`` on."""
    there = k_PSGK.index_select(0, pages) if first is None else k_PSGK.narrow(0, first, len(pages))
    return there.flatten(0, 1)


def weights(q_RHK: Tensor, k_LGK: Tensor, limit_R: Tensor | None, lse_RH: Tensor | None) -> Tensor:
    """Attention ``[H, R, L]`` in fp32; zeros in rows with no visible position."""
    rows, heads, size = q_RHK.shape
    groups = k_LGK.shape[1]
    # Scaled before the product, with the query heads that share keys as rows: fewer passes over [H, R, L].
    q_GMK = (q_RHK.float() * size**-0.5).transpose(0, 1).reshape(groups, -1, size)
    scores = (q_GMK @ k_LGK.permute(1, 2, 0)).view(heads, rows, len(k_LGK))
    if limit_R is not None:
        unseen = torch.arange(len(k_LGK), device=k_LGK.device) >= limit_R[:, None]
        scores.masked_fill_(unseen, -torch.inf)
    if lse_RH is not None:
        lse_HR1 = lse_RH.T[:, :, None]
        return scores.sub_(torch.where(lse_HR1 == -torch.inf, 0.0, lse_HR1)).exp_()
    made = scores.softmax(-1)
    return made if limit_R is None else made.masked_fill_((limit_R <= 0)[:, None], 0.0)
