"""The specification of ``cached_attention``: attention of each request's rows over its own pages, in plain PyTorch.

Shapes in names: T query rows of all requests, P pages, S positions a page, H query heads, G key/value heads, U query
heads that share one, K head size; R rows of one request, L its positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmserve_kernels.cached_attention.batch import FixedBatch, Ragged
from mmserve_kernels.kv_quant import QuantizedPages, dequantize


def cached_attention(
    q_THK: Tensor,
    k_PSGK: Tensor | QuantizedPages,
    v_PSGK: Tensor | QuantizedPages,
    ragged: Ragged | FixedBatch,
    *,
    lse_TH: Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Attention output ``[T, H, K]`` of rotated queries over the pages of their own request.

    A row sees the positions of its request below its limit; with a ``window``, only the last ``window`` positions
    before its end and all after it (see ``Ragged.window_end``). A ``cap`` replaces scaled scores by ``cap * tanh(score
    / cap)`` (Gemma 2, arXiv 2408.00118). 0 disables either. ``lse_TH`` (fp32, if given) is filled with the natural
    log-sum-exp of each row's scaled scores. Rows with no visible position, and rows of no request, are zeros, with a
    log-sum-exp of -inf. Positions beyond a request's length are not read: they may be NaN.
    """
    out_THK = torch.zeros_like(q_THK, memory_format=torch.contiguous_format)
    if lse_TH is not None:
        lse_TH.fill_(-torch.inf)
    start = 0
    for rows, length, pages in _requests(ragged):
        here = slice(start, start + rows)
        start += rows
        q_GRUK = q_THK[here].float().unflatten(1, (k_PSGK.shape[2], -1)).transpose(0, 1)
        k_LGK, v_LGK = (_positions(x, pages, q_THK.dtype)[:length] for x in (k_PSGK, v_PSGK))
        scores_GRUL = torch.einsum("gruk,lgk->grul", q_GRUK, k_LGK) * q_THK.shape[-1] ** -0.5
        scores_GRUL = torch.tanh(scores_GRUL / cap) * cap if cap else scores_GRUL
        at_L = torch.arange(length, device=q_THK.device)
        limit_R = at_L.new_full((rows,), length) if ragged.kv_limit is None else ragged.kv_limit[here].clamp(max=length)
        unseen_RL = at_L >= limit_R[:, None]
        if window:
            end_R = limit_R
            if isinstance(ragged, Ragged) and ragged.window_end is not None:
                end_R = torch.minimum(ragged.window_end[here], limit_R)
            unseen_RL = unseen_RL | (at_L < end_R[:, None] - window)
        scores_GRUL = scores_GRUL.masked_fill(unseen_RL[:, None], -torch.inf)
        lse_GRU1 = scores_GRUL.logsumexp(-1, keepdim=True)
        weights_GRUL = (scores_GRUL - lse_GRU1).exp().where(lse_GRU1 > -torch.inf, 0.0)
        out_GRUK = torch.einsum("grul,lgk->gruk", weights_GRUL, v_LGK)
        out_THK[here] = out_GRUK.transpose(0, 1).flatten(1, 2).to(q_THK.dtype)
        if lse_TH is not None:
            lse_TH[here] = lse_GRU1.squeeze(-1).transpose(0, 1).flatten(1)
    return out_THK


def _requests(batch: Ragged | FixedBatch) -> Iterator[tuple[int, int, Tensor]]:
    """Number of rows, number of positions, and pages of each request."""
    if isinstance(batch, Ragged):
        yield from zip(batch.row_counts, batch.kv_lengths, batch.page_tables, strict=True)
        return
    yield from zip(batch.row_counts.tolist(), batch.kv_lengths.tolist(), batch.page_tables, strict=True)


def _positions(source: Tensor | QuantizedPages, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of ``pages`` in order, rounded to ``dtype``, as fp32 ``[positions, G, K]``."""
    x = dequantize(source.select(pages)) if isinstance(source, QuantizedPages) else source.index_select(0, pages)
    return x.flatten(0, 1).to(dtype).float()
