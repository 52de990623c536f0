"""``cached_attention`` from PyTorch operations, tuned for a CPU: used wherever the Triton kernel does not run.

Shapes in names: T query rows of all requests, P pages, S positions a page, H query heads, G key/value heads, K head
size; U query heads that share a key/value head, M = R · U; R rows, or requests of a batch of fixed size, L
positions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.cached_attention.batch import FixedBatch, LoneRows, Ragged
from mmserve_kernels.cached_attention.pieces import ALL, Piece
from mmserve_kernels.cached_attention.rows import attend_rows
from mmserve_kernels.cached_attention.windowed import windowed_attention
from mmserve_kernels.kv_quant import QuantizedPages, dequantize

#: Maximum bytes of one request's keys, or of its values, that are first read sequentially in memory order before a
#: product reads them head by head. The keys of one head are interleaved with those of the others: slow to read from
#: memory. CPU time of a pass of a 15 M LLaMA (6 layers of 6 heads of 48) over 16 requests of one row and some 90
#: positions: 15.7 ms instead of 18.7; over 4 of 500 positions 12.4 instead of 15.9; of the bundled diffusion model over
#: 4 requests of 32 rows and 500 positions 30.5 instead of 31.5. Between two passes a layer's keys are evicted from the
#: inner caches by the weights of all layers.
_FETCHED = 2 << 20
#: Maximum rows of a head for which that pays off: products with more rows reorder the keys themselves.
_FEW = 64
#: Minimum rows of a product whose sums on a CPU do not depend on the number of rows: with 1 to 3 rows the last bits
#: differ, in fp32 always, in bf16 and fp16 occasionally.
FLOOR = 4


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

    Each request is computed separately, so its result is independent of its batch. On a CPU, a row's bits are also
    independent of the other rows of its request in the pass, if there are at least ``FLOOR`` of them (times the query
    heads that share a key/value head) and ``pieces`` does not split them. Contiguous pages are read in place, others
    are gathered first. ``lse_TH`` (fp32, if given) is filled with the natural log-sum-exp of each row's scaled scores.
    ``window`` and ``cap`` are as in the reference. Rows with no visible position are zeros. With a ``FixedBatch`` there
    is no device synchronization: the call can be captured in a CUDA graph.
    """
    if isinstance(ragged, FixedBatch):
        return _fixed(q_THK, k_PSGK, v_PSGK, ragged, lse_TH, window, cap)
    if not ragged.pieces:
        return torch.empty_like(q_THK)
    share = q_THK.shape[1] // k_PSGK.shape[2]
    if window or cap:
        read = _reader(k_PSGK, v_PSGK, ragged, q_THK.dtype, share)
        return windowed_attention(
            q_THK, ragged, read, _products, window=window, cap=cap, page=k_PSGK.shape[1], lse_TH=lse_TH
        )
    if share < FLOOR and lse_TH is None and isinstance(k_PSGK, Tensor) and isinstance(v_PSGK, Tensor):
        lone = ragged.lone_rows if _in_place(q_THK, k_PSGK, v_PSGK) else None
        if lone is not None:
            return attend_rows(q_THK.float(), k_PSGK, v_PSGK, lone).to(q_THK.dtype)
    attend = _attends(q_THK, k_PSGK, v_PSGK, ragged, share, lse_TH)
    if len(ragged.pieces) == 1 and share == 1:
        return attend(ragged.pieces[0], 0, q_THK.transpose(0, 1).unsqueeze(0)).transpose(1, 2).reshape(q_THK.shape)
    out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    start = 0
    # Views of all pieces in one call, and each result copied while it is cached: for many small requests each
    # microsecond matters, and for large ones another pass over the whole.
    pairs = (_by_group(x, share).split(ragged.piece_rows, 2) for x in (q_THK, out_THK))
    for piece, q_1GRUK, out_1GRUK in zip(ragged.pieces, *pairs, strict=True):
        made = attend(piece, start, q_1GRUK.flatten(2, 3))
        out_1GRUK.copy_(made.view(out_1GRUK.shape))
        start += piece.rows
    return out_THK


def _by_group(x_THK: Tensor, share: int) -> Tensor:
    """``[1, G, T, U, K]`` of rows: the U query heads that share a key/value head become rows of it.

    A row of 28 heads over 4 takes half as long as with SDPA's own grouping, which reads the keys once for each query
    head, and 32 rows a twentieth less.
    """
    return x_THK.unflatten(1, (-1, share)).transpose(0, 1).unsqueeze(0)


def _attends(
    q_THK: Tensor,
    k_PSGK: Tensor | QuantizedPages,
    v_PSGK: Tensor | QuantizedPages,
    ragged: Ragged,
    share: int,
    lse_TH: Tensor | None,
) -> Callable[[Piece, int, Tensor], Tensor]:
    """A function that computes the attention ``[1, G, R · U, K]`` of a piece from its first row and its queries."""
    read = _reader(k_PSGK, v_PSGK, ragged, q_THK.dtype, share)
    mask_of = None if ragged.kv_limit is None else _masks(ragged, ragged.kv_limit, q_THK)
    last: tuple[int, tuple[Tensor, Tensor]] | None = None

    def attend(piece: Piece, start: int, q_1GMK: Tensor) -> Tensor:
        nonlocal last
        request, rows, width, span = piece
        if last is None or last[0] != request:
            last = request, read(request)
        k_1GLK, v_1GLK = last[1]
        if width != ragged.kv_lengths[request]:
            k_1GLK, v_1GLK = k_1GLK.narrow(2, 0, width), v_1GLK.narrow(2, 0, width)
        mask = None if span == ALL or mask_of is None else mask_of(piece, start)
        if not width:
            if lse_TH is not None:
                lse_TH[start : start + rows] = -torch.inf
            return torch.zeros_like(q_1GMK)
        if rows == 1 and piece.reach and share < FLOOR and q_1GMK.device.type == "cpu":
            k_1GLK, v_1GLK = (x.narrow(2, 0, piece.reach) for x in (k_1GLK, v_1GLK))
            if lse_TH is not None:
                lse_TH[start] = _log_sum_exp(q_1GMK, k_1GLK, None).flatten()
            return _lone(q_1GMK, k_1GLK, v_1GLK)
        if mask is not None and share > 1:
            mask = mask.repeat_interleave(share, 0)
        if lse_TH is None:
            return _products(q_1GMK, k_1GLK, v_1GLK, mask)
        made, lse_1GM = _products_and_sums(q_1GMK, k_1GLK, v_1GLK, mask)
        lse_TH[start : start + rows] = lse_1GM[0].unflatten(1, (rows, share)).transpose(0, 1).flatten(1)
        return made

    return attend


def _in_place(q_THK: Tensor, *pages: Tensor) -> bool:
    """Whether single rows can attend to ``pages`` without a copy."""
    kind = q_THK.dtype
    if not q_THK.is_cpu or kind not in (torch.float32, torch.bfloat16):
        return False
    return all(x.dtype == kind and x.is_contiguous() for x in pages)


def _lone(q_1GMK: Tensor, k_1GLK: Tensor, v_1GLK: Tensor) -> Tensor:
    """Attention ``[1, G, M, K]`` of a single row over all L positions, as one page of them."""
    length = k_1GLK.shape[2]
    k_1LGK, v_1LGK = (x.float().transpose(1, 2).contiguous() for x in (k_1GLK, v_1GLK))
    whole = LoneRows(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([length]))
    return attend_rows(q_1GMK.float().flatten(1, 2), k_1LGK, v_1LGK, whole).view(q_1GMK.shape).to(q_1GMK.dtype)


def _products(q_1GMK: Tensor, k_1GLK: Tensor, v_1GLK: Tensor, mask_ML: Tensor | None) -> Tensor:
    """SDPA in which a row's bits are independent of the other rows, if there are at least ``FLOOR``."""
    made = [
        F.scaled_dot_product_attention(q_1GMK[:, :, part], k_1GLK, v_1GLK, None if mask_ML is None else mask_ML[part])
        for part in _parts(q_1GMK)
    ]
    return made[0] if len(made) == 1 else torch.cat(made, 2)


def _products_and_sums(q_1GMK: Tensor, k_1GLK: Tensor, v_1GLK: Tensor, mask_ML: Tensor | None) -> tuple[Tensor, Tensor]:
    """As ``_products``, and the log-sum-exp ``[1, G, M]`` of each row's scaled scores, in fp32; SDPA's own differs by
    up to 5e-5 for half precision."""
    if q_1GMK.device.type != "cpu" or q_1GMK.dtype != torch.float32:
        return _products(q_1GMK, k_1GLK, v_1GLK, mask_ML), _log_sum_exp(q_1GMK, k_1GLK, mask_ML)
    made = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_1GMK[:, :, part], k_1GLK, v_1GLK, attn_mask=None if mask_ML is None else mask_ML[part]
        )
        for part in _parts(q_1GMK)
    ]
    out_1GMK, lse_1GM = (torch.cat(each, 2) for each in zip(*made, strict=True))
    if mask_ML is not None:
        lse_1GM = lse_1GM.masked_fill(mask_ML.isneginf().all(-1), -torch.inf)
    return out_1GMK, lse_1GM


def _parts(q_1GMK: Tensor) -> tuple[slice, ...]:
    """The rows of each call. A CPU processes 32 at a time, or 64, or 256 (torch's ``FlashAttentionKernel.cpp``). If the
    last group would be too small, it becomes a separate call of 16 rows."""
    rows = q_1GMK.shape[2]
    last = rows % (32 if rows < 192 else 64 if rows < 768 else 256)
    if not 0 < last < FLOOR or rows == last or q_1GMK.device.type != "cpu":
        return (slice(None),)
    return slice(rows - 16), slice(rows - 16, None)


def _fixed(
    q_THK: Tensor,
    k_PSGK: Tensor | QuantizedPages,
    v_PSGK: Tensor | QuantizedPages,
    batch: FixedBatch,
    lse_TH: Tensor | None,
    window: int,
    cap: float,
) -> Tensor:
    """Masked attention ``[T, H, K]`` over all pages of all tables, a row at a time: slow, a specification."""
    requests, pages = batch.page_tables.shape
    groups = k_PSGK.shape[2]
    length = pages * k_PSGK.shape[1]
    rows = torch.arange(len(q_THK), device=q_THK.device)
    own = torch.searchsorted(batch.row_counts.cumsum(0), rows, right=True).clamp_max(requests - 1)
    at_L = torch.arange(length, device=q_THK.device)
    seen_TL = at_L < batch.kv_limit[:, None]
    if window:
        seen_TL = seen_TL & (at_L >= batch.kv_limit[:, None] - window)
    k_TLGK, v_TLGK = (
        _gathered(x, batch.page_tables.flatten(), requests * length)[0]
        .transpose(0, 1)
        .float()
        .unflatten(0, (requests, length))[own]
        .masked_fill(~seen_TL[:, :, None, None], 0.0)  # uninitialized memory may be NaN
        for x in (k_PSGK, v_PSGK)
    )
    q_TGUK = q_THK.float().unflatten(1, (groups, -1))
    scores = torch.einsum("tguk,tlgk->tgul", q_TGUK, k_TLGK) * q_THK.shape[-1] ** -0.5
    scores = torch.tanh(scores / cap) * cap if cap else scores
    scores = scores.masked_fill(~seen_TL[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if lse_TH is not None:
        lse_TH.copy_(lse.flatten(1))
    weights = (scores - lse).exp().masked_fill(~seen_TL[:, None, None], 0.0)
    return torch.einsum("tgul,tlgk->tguk", weights, v_TLGK).flatten(1, 2).to(q_THK.dtype)


def _reader(
    k_PSGK: Tensor | QuantizedPages, v_PSGK: Tensor | QuantizedPages, ragged: Ragged, dtype: torch.dtype, share: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function that returns a request's keys and values, each ``[1, G, L, K]`` in order; views if contiguous."""
    lengths, tables, runs = ragged.kv_lengths, ragged.page_tables, ragged.runs

    def gathered(request: int) -> tuple[Tensor, Tensor]:
        of = (tables[request], lengths[request], runs[request])
        k, v = (_gathered(x, *of).to(dtype) for x in (k_PSGK, v_PSGK))
        return k, v

    if isinstance(k_PSGK, QuantizedPages) or isinstance(v_PSGK, QuantizedPages) or k_PSGK.dtype != dtype:
        return gathered
    strides = k_PSGK.stride()
    if not k_PSGK.is_contiguous() or v_PSGK.stride() != strides or v_PSGK.dtype != dtype:
        return gathered
    page, position, head, _one = strides
    groups, size = k_PSGK.shape[2:]
    k_begin, v_begin = k_PSGK.storage_offset(), v_PSGK.storage_offset()
    nbytes = position * k_PSGK.itemsize
    fewest = 1 if dtype == torch.float32 else 2  # a single row of bf16 or fp16 is cached by its conversion to fp32

    def read(request: int) -> tuple[Tensor, Tensor]:
        first, length = runs[request], lengths[request]
        if first is None:
            return gathered(request)
        at = first * page
        shape, apart = (1, groups, length, size), (0, head, position, 1)
        k, v = k_PSGK.as_strided(shape, apart, k_begin + at), v_PSGK.as_strided(shape, apart, v_begin + at)
        if length * nbytes <= _FETCHED and fewest <= ragged.row_counts[request] * share <= _FEW:
            for x in (k, v):
                x.sum()  # reads dense memory in memory order
        return k, v

    return read


def _masks(ragged: Ragged, limits: Tensor, like: Tensor) -> Callable[[Piece, int], Tensor]:
    """A function that returns the additive mask ``[rows, width]`` of a piece from its first row, in the dtype of
    ``like``.

    Masks of rows that each see one position more than the previous row are views of one tensor: all rows see its first
    ``seen`` columns, all but the first row the next one, and so on.
    """
    rows, seen, behind = ragged.triangle
    triangle = like.new_full((rows, seen + behind), -torch.inf).triu_(seen) if rows else like.new_empty(0)

    def mask(piece: Piece, start: int) -> Tensor:
        if piece.span >= 0:
            return triangle[: piece.rows].narrow(1, seen - piece.span, piece.width)
        hidden = torch.arange(piece.width, device=like.device) >= limits[start : start + piece.rows, None]
        return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)

    return mask


def _gathered(source: Tensor | QuantizedPages, pages: Tensor, length: int, first: int | None = None) -> Tensor:
    """Keys or values ``[1, G, length, K]`` of ``pages``, in order; ``first``: the first page, if they are
    contiguous."""
    if isinstance(source, QuantizedPages):
        found = dequantize(source.select(pages) if first is None else source.narrow(first, len(pages)))
    else:
        found = source.index_select(0, pages)
    return found.flatten(0, 1).narrow(0, 0, length).transpose(0, 1).unsqueeze(0)


def _log_sum_exp(q_1GMK: Tensor, k_1GLK: Tensor, mask_ML: Tensor | None) -> Tensor:
    """Log-sum-exp ``[1, G, M]`` of the scaled scores of rows, in fp32."""
    scores = q_1GMK.float() @ k_1GLK.float().transpose(2, 3) * q_1GMK.shape[-1] ** -0.5
    return (scores if mask_ML is None else scores + mask_ML.float()).logsumexp(-1)
