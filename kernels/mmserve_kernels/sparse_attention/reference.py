"""The PyTorch reference of ``sparse_attention``.

Shapes in names: T query rows of all requests, R of one, P pages, S positions a page, H query heads, A index heads,
G key/value heads, K head size, L positions of a request.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.sparse_attention.index import BlockIndex


def sparse_attention(q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, ragged: Ragged, index: BlockIndex) -> Tensor:
    """Attention output ``[T, H, K]`` of rotated queries over the blocks of their request selected by ``index``.

    ``cached_attention`` on fewer positions: limits apply as there, and with all blocks the result is equal up to
    rounding. Rows with no visible position are zeros. In prefill each block of rows has its own blocks; in decode, with
    one block of rows and the page size as ``kv_block``, the index selects pages. Each request is computed separately.

    Raises ``ValueError`` if the index does not match the requests or heads.
    """
    heads = q_THK.shape[1]
    index.check(ragged.row_counts, heads, k_PSGK.shape[2])
    out = torch.zeros_like(q_THK)
    start = block = 0
    for rows, length, pages in zip(ragged.row_counts, ragged.kv_lengths, ragged.page_tables, strict=True):
        here = slice(start, start + rows)
        mask_ARL = _mask(index, block, rows, length)
        if ragged.kv_limit is not None:
            mask_ARL &= torch.arange(length, device=mask_ARL.device) < ragged.kv_limit[here, None]
        if rows:
            mask_HRL = mask_ARL.repeat_interleave(heads // index.heads, 0)
            made = F.scaled_dot_product_attention(
                q_THK[here].transpose(0, 1)[None],
                k_PSGK.index_select(0, pages).flatten(0, 1)[:length].transpose(0, 1)[None],
                v_PSGK.index_select(0, pages).flatten(0, 1)[:length].transpose(0, 1)[None],
                attn_mask=mask_HRL[None],
                enable_gqa=heads != k_PSGK.shape[2],
            )[0]
            out[here] = torch.where(mask_HRL.any(-1, keepdim=True), made, 0).transpose(0, 1)
        start += rows
        block += index.row_blocks(rows)
    return out


def _mask(index: BlockIndex, first: int, rows: int, length: int) -> Tensor:
    """Boolean ``[A, rows, length]`` for the request whose first block of rows is ``first``."""
    count = index.row_blocks(rows)
    starts = index.starts[:-1].view(index.heads, -1)[:, first : first + count]
    ends = index.starts[1:].view(index.heads, -1)[:, first : first + count]
    chosen = torch.zeros(index.heads, count, -(-length // index.kv_block), dtype=torch.bool, device=starts.device)
    for head in range(index.heads if count else 0):
        blocks = index.blocks[starts[head, 0] : ends[head, -1]].long()
        chosen[head, torch.arange(count, device=starts.device).repeat_interleave(ends[head] - starts[head]), blocks] = (
            True
        )
    wide = chosen.repeat_interleave(index.kv_block, 2)[:, :, :length]
    return wide.repeat_interleave(index.q_block, 1)[:, :rows].contiguous()
