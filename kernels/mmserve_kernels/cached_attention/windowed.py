"""Attention with sliding windows or capped scores, from PyTorch operations.

Shapes in names: T query rows of all requests, H query heads, G key/value heads, U query heads that share one, K head
size; R rows of a piece, L positions visible to any of them, M = R · U.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.cached_attention.batch import Ragged

#: Rows of a product with capped scores: a fixed number, so that no bit depends on the number of rows, and the tanh of
#: all of them is vectorized.
TILE = 32


def windowed_attention(
    q_THK: Tensor,
    ragged: Ragged,
    read: Callable[[int], tuple[Tensor, Tensor]],
    products: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    *,
    window: int,
    cap: float,
    page: int,
    lse_TH: Tensor | None = None,
) -> Tensor:
    """``reference.cached_attention`` with a ``window``, a ``cap`` or both.

    ``read`` returns a request's keys and values ``[1, G, L, K]``; ``products`` computes attention of ``[1, G, M, K]``
    with an additive mask ``[M, L]``. The keys skipped by a piece are determined by the page (of ``page`` positions)
    that contains its first row's window end, so a row's bits are independent of the other rows of its pass.
    """
    if lse_TH is not None:
        raise ValueError("log-sum-exps of windowed or capped attention are the kernel's and the reference's only")
    out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    start = 0
    for request, rows, width, _span in ragged.pieces:
        here = slice(start, start + rows)
        start += rows
        k_1GLK, v_1GLK = read(request)
        share = q_THK.shape[1] // k_1GLK.shape[1]
        limit_R = torch.full((rows,), width, device=q_THK.device)
        if ragged.kv_limit is not None:
            limit_R = ragged.kv_limit[here].clamp(max=width)
        end_R = limit_R if ragged.window_end is None else torch.minimum(ragged.window_end[here], limit_R)
        first = 0
        if window and q_THK.device.type == "cpu":
            first = max(0, (int(end_R.min()) - 1) // page * page + 1 - window)
        at_L = torch.arange(first, width, device=q_THK.device)
        hidden_RL = at_L >= limit_R[:, None]
        if window:
            hidden_RL |= at_L < end_R[:, None] - window
        k_1GLK, v_1GLK = (x.narrow(2, first, width - first) for x in (k_1GLK, v_1GLK))
        q_1GMK = q_THK[here].unflatten(1, (-1, share)).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        mask_ML = torch.zeros_like(hidden_RL, dtype=q_THK.dtype).masked_fill_(hidden_RL, -torch.inf)
        mask_ML = mask_ML.repeat_interleave(share, 0) if share > 1 else mask_ML
        made = _capped(q_1GMK, k_1GLK, v_1GLK, mask_ML, cap) if cap else products(q_1GMK, k_1GLK, v_1GLK, mask_ML)
        out_THK[here] = made[0].unflatten(1, (rows, share)).transpose(0, 1).flatten(1, 2)
    return out_THK


def _capped(q_1GMK: Tensor, k_1GLK: Tensor, v_1GLK: Tensor, mask_ML: Tensor, cap: float) -> Tensor:
    """Attention with capped scores, in fp32, ``TILE`` rows at a time."""
    rows = q_1GMK.shape[2]
    short = -rows % TILE
    q_1GMK, mask_ML = F.pad(q_1GMK, (0, 0, 0, short)), F.pad(mask_ML.float(), (0, 0, 0, short))
    k_1GKL, v_1GLK = k_1GLK.float().transpose(2, 3), v_1GLK.float()
    made = []
    for q, mask in zip(q_1GMK.float().split(TILE, 2), mask_ML.split(TILE), strict=True):
        scores = torch.tanh(q @ k_1GKL * (q.shape[-1] ** -0.5 / cap)) * cap
        made.append((scores + mask).softmax(-1) @ v_1GLK)
    return torch.cat(made, 2)[:, :, :rows].to(q_1GMK.dtype)
