"""The PyTorch reference of ``rope_scatter``: rotary position embedding (arXiv 2104.09864), and the write into pages.

Shapes in names: T rows, P pages, S positions a page, H query heads, G key/value heads, K head size, W rotated
dimensions of a head, A axes of position. Heads are rotated in halves, as LLaMA, Qwen and LLaDA do: dimension i turns
with dimension i + W/2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., heads, K]``; dimensions beyond the width of the table are unchanged."""
    x, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    x = x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x


def by_axis(table_A1W: Tensor, axes: Tensor) -> Tensor:
    """One table ``[..., 1, W]`` from several, ``[A, ..., 1, W]``, one an axis of position (M-RoPE, arXiv 2409.12191).

    ``axes`` (int64 ``[W/2]``) is the axis of each frequency. In Qwen2-VL they are contiguous sections,
    ``torch.arange(3).repeat_interleave(torch.tensor([16, 24, 24]))``.
    """
    index = axes.repeat(2).expand(1, *table_A1W.shape[1:])
    return table_A1W.gather(0, index)[0]


def rope_scatter(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    cos_T1W: Tensor,
    sin_T1W: Tensor,
    k_PSGK: Tensor,
    v_PSGK: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated queries ``[T, H, K]``; rotated keys, and values, are written into their pages in place.

    The tables (fp32) hold cosine and sine of each row's angles, the same in both halves of W; 1-D, partial (W < K) and
    multi-axis (``by_axis``) embeddings differ only in the tables. ``slots`` (int64 ``[T]``): page × S + offset of each
    row, distinct except for slots that are never read. Keys and values are converted to the dtype of the pages.
    """
    # Queries and keys in one call: with few rows, the number of operations determines the time.
    rotated = rotate(torch.cat([q_THK, k_TGK], 1), cos_T1W, sin_T1W)
    q_THK, k_TGK = rotated.split([q_THK.shape[1], k_TGK.shape[1]], 1)
    k_PSGK.view(-1, *k_PSGK.shape[2:]).index_copy_(0, slots, k_TGK.to(k_PSGK.dtype))
    v_PSGK.view(-1, *v_PSGK.shape[2:]).index_copy_(0, slots, v_TGK.to(v_PSGK.dtype))
    return q_THK
