"""The PyTorch reference of ``cached_attention``.

Shapes in names: T query rows of all requests, P pages, S positions a page, H query heads, G key/value heads,
K head size; R rows, or requests of a batch of fixed size, W pages of each of those, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve_kernels.kv_quant import QuantizedPages, dequantize


@dataclass(frozen=True, eq=False)
class Ragged:
    """Which rows of a batch are whose, and where each request's keys and values lie.

    Rows are laid request after request; ``row_counts[r]`` of them belong to request r, whose ``kv_lengths[r]``
    positions fill the pages ``page_tables[r]`` (int64 ``[ceil(kv_length / S)]``) in order. ``slots`` (int64 ``[T]``)
    says where each row's own key and value belong: page × S + offset. ``kv_limit`` (int64 ``[T]``) bounds what a
    row may look at: positions below its limit; None = all of its request.
    """

    row_counts: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    page_tables: tuple[Tensor, ...]
    slots: Tensor
    kv_limit: Tensor | None = None

    @cached_property
    def runs(self) -> tuple[int | None, ...]:
        """First page of each request whose pages lie one behind another in a CPU's memory; None of others."""
        if self.slots.device.type != "cpu":
            return (None,) * len(self.page_tables)
        ids = [table.numpy() for table in self.page_tables]
        return tuple(int(a[0]) if len(a) and (np.diff(a) == 1).all() else None for a in ids)


@dataclass(frozen=True, eq=False)
class FixedBatch:
    """A batch in tensors of fixed shapes: what is in them may change between two runs of the same recorded work.

    All int64, on one device. Rows are laid as in ``Ragged``: ``row_counts [R]`` of them belong to each request, whose
    ``kv_lengths [R]`` positions fill the first pages of its row of ``page_tables [R, W]``. Rows past the last request's
    see nothing. ``slots [T]`` and ``kv_limit [T]`` are as in ``Ragged``; the limit is always there, at most the
    request's length. Entries of ``page_tables`` that hold nothing name any page of the store.
    """

    row_counts: Tensor
    kv_lengths: Tensor
    page_tables: Tensor
    slots: Tensor
    kv_limit: Tensor


def cached_attention(
    q_THK: Tensor,
    k_PSGK: Tensor | QuantizedPages,
    v_PSGK: Tensor | QuantizedPages,
    ragged: Ragged | FixedBatch,
    *,
    lse_TH: Tensor | None = None,
) -> Tensor:
    """Attention output ``[T, H, K]`` of rotated queries over the pages of their own request.

    Each request is computed by itself, so its result does not depend on who else is in the batch. Pages that lie one
    behind another are read where they are, others are gathered first. ``lse_TH`` (fp32,
    if given) is filled with the natural log-sum-exp of each row's scaled scores. Rows that see nothing are zeros. Over
    a ``FixedBatch`` nothing is asked of the device: such a call can be recorded and run again.
    """
    if isinstance(ragged, FixedBatch):
        return _fixed(q_THK, k_PSGK, v_PSGK, ragged, lse_TH)
    # Whatever can be is done once for all requests: with views of its own for each, 16 requests of 32 rows over 512
    # positions of 8 heads of 32 took 6% longer than SDPA on keys in one piece.
    share, dtype = q_THK.shape[1] // k_PSGK.shape[2], q_THK.dtype
    q_1TGUK = q_THK.unsqueeze(0) if share == 1 else q_THK.unflatten(1, (-1, share)).unsqueeze(0)
    of_request = q_1TGUK.transpose(1, 2).split(ragged.row_counts, 2)
    k_1GNK, v_1GNK = _as_they_lie(k_PSGK), _as_they_lie(v_PSGK)
    out: list[Tensor] = []
    start = 0
    requests = zip(ragged.row_counts, of_request, ragged.kv_lengths, ragged.page_tables, ragged.runs, strict=True)
    for rows, q_1GRUK, length, pages, run in requests:
        if rows == 0:
            continue
        if run is None or k_1GNK is None or v_1GNK is None:
            k_1GLK, v_1GLK = _gathered(k_PSGK, pages, length), _gathered(v_PSGK, pages, length)
        else:
            first = run * k_PSGK.shape[1]
            k_1GLK, v_1GLK = k_1GNK.narrow(2, first, length), v_1GNK.narrow(2, first, length)
        if k_1GLK.dtype != dtype or v_1GLK.dtype != dtype:
            k_1GLK, v_1GLK = k_1GLK.to(dtype), v_1GLK.to(dtype)
        mask = None
        if ragged.kv_limit is not None:
            mask = torch.arange(length, device=q_THK.device) < ragged.kv_limit[start : start + rows, None]
        if lse_TH is not None:
            here = slice(start, start + rows)
            lse_TH[here] = _log_sum_exp(q_THK[here], k_1GLK[0].transpose(0, 1), mask)
        if share == 1:
            out.append(F.scaled_dot_product_attention(q_1GRUK, k_1GLK, v_1GLK, mask).transpose(1, 2))
        else:
            out.append(_shared(q_1GRUK, k_1GLK, v_1GLK, mask))
        start += rows
    if not out:
        return torch.empty_like(q_THK)
    return (out[0] if len(out) == 1 else torch.cat(out, 1)).reshape(q_THK.shape)


def _fixed(
    q_THK: Tensor,
    k_PSGK: Tensor | QuantizedPages,
    v_PSGK: Tensor | QuantizedPages,
    batch: FixedBatch,
    lse_TH: Tensor | None,
) -> Tensor:
    """Attention ``[T, H, K]`` over all pages of all tables, masked, a row at a time: what it is, not how to do it."""
    requests, pages = batch.page_tables.shape
    groups = k_PSGK.shape[2]
    length = pages * k_PSGK.shape[1]
    rows = torch.arange(len(q_THK), device=q_THK.device)
    own = torch.searchsorted(batch.row_counts.cumsum(0), rows, right=True).clamp_max(requests - 1)
    seen_TL = torch.arange(length, device=q_THK.device) < batch.kv_limit[:, None]
    k_TLGK, v_TLGK = (
        _gathered(x, batch.page_tables.flatten(), requests * length)[0]
        .transpose(0, 1)
        .float()
        .unflatten(0, (requests, length))[own]
        .masked_fill(~seen_TL[:, :, None, None], 0.0)  # what nobody wrote may be no number
        for x in (k_PSGK, v_PSGK)
    )
    q_TGUK = q_THK.float().unflatten(1, (groups, -1))
    scores = torch.einsum("tguk,tlgk->tgul", q_TGUK, k_TLGK) * q_THK.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen_TL[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if lse_TH is not None:
        lse_TH.copy_(lse.flatten(1))
    weights = (scores - lse).exp().masked_fill(~seen_TL[:, None, None], 0.0)
    return torch.einsum("tgul,tlgk->tguk", weights, v_TLGK).flatten(1, 2).to(q_THK.dtype)


def _shared(q_1GRUK: Tensor, k_1GLK: Tensor, v_1GLK: Tensor, mask_RL: Tensor | None) -> Tensor:
    """Attention ``[1, R, G, H / G, K]`` of one request whose query heads share keys.

    They become rows of one head: a row of 28 heads over 4 takes half as long as with SDPA's own sharing, which reads
    the keys once for each query head.
    """
    mask_ML = None if mask_RL is None else mask_RL.repeat_interleave(q_1GRUK.shape[3], 0)
    made = F.scaled_dot_product_attention(q_1GRUK.flatten(2, 3), k_1GLK, v_1GLK, mask_ML)
    return made.view(q_1GRUK.shape).transpose(1, 2)


def _as_they_lie(source: Tensor | QuantizedPages) -> Tensor | None:
    """Keys or values ``[1, G, P · S, K]`` of all pages; None where attention cannot read what is stored."""
    if isinstance(source, QuantizedPages):
        return None
    _pages, _positions, groups, size = source.shape
    return source.reshape(1, -1, groups, size).transpose(1, 2)


def _gathered(source: Tensor | QuantizedPages, pages: Tensor, length: int) -> Tensor:
    """Keys or values ``[1, G, length, K]`` of ``pages``, in their order."""
    found = dequantize(source.select(pages)) if isinstance(source, QuantizedPages) else source.index_select(0, pages)
    return found.flatten(0, 1).narrow(0, 0, length).transpose(0, 1).unsqueeze(0)


def _log_sum_exp(q_RHK: Tensor, k_LGK: Tensor, mask_RL: Tensor | None) -> Tensor:
    """Log-sum-exp ``[R, H]`` of the scaled scores of R rows, in fp32."""
    q_GRUK = q_RHK.float().unflatten(1, (k_LGK.shape[1], -1)).transpose(0, 1)
    scores = torch.einsum("gruk,lgk->grul", q_GRUK, k_LGK.float()) * q_RHK.shape[-1] ** -0.5
    if mask_RL is not None:
        scores = scores.masked_fill(~mask_RL[:, None], -torch.inf)
    return scores.logsumexp(-1).transpose(0, 1).flatten(1)
