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
    out: list[Tensor] = []
    start = 0
    requests = zip(ragged.row_counts, ragged.kv_lengths, ragged.page_tables, ragged.runs, strict=True)
    for rows, length, pages, run in requests:
        if rows == 0:
            continue
        here = slice(start, start + rows)
        q_RHK = q_THK[here]
        k_LGK, v_LGK = (_read(x, pages, run, length, q_THK.dtype) for x in (k_PSGK, v_PSGK))
        mask = None
        if ragged.kv_limit is not None:
            mask = torch.arange(length, device=q_THK.device) < ragged.kv_limit[here, None]
        if lse_TH is not None:
            lse_TH[here] = _log_sum_exp(q_RHK, k_LGK, mask)
        out.append(_attend(q_RHK, k_LGK, v_LGK, mask))
        start += rows
    if len(out) == 1:
        return out[0]
    return torch.cat(out) if out else torch.empty_like(q_THK)


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
        _read(x, batch.page_tables.flatten(), None, requests * length, torch.float32)
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


def _attend(q_RHK: Tensor, k_LGK: Tensor, v_LGK: Tensor, mask_RL: Tensor | None) -> Tensor:
    """Attention ``[R, H, K]`` of one request.

    Query heads that share keys become rows of one head: a row of 28 heads over 4 takes half as long as with SDPA's own
    sharing, which reads the keys once for each query head.
    """
    groups = k_LGK.shape[1]
    share = q_RHK.shape[1] // groups
    k_GLK, v_GLK = k_LGK.transpose(0, 1), v_LGK.transpose(0, 1)
    if share == 1:
        made = F.scaled_dot_product_attention(q_RHK.transpose(0, 1)[None], k_GLK[None], v_GLK[None], mask_RL)
        return made[0].transpose(0, 1)
    q_GMK = q_RHK.unflatten(1, (groups, share)).transpose(0, 1).flatten(1, 2)
    mask_ML = None if mask_RL is None else mask_RL.repeat_interleave(share, 0)
    made = F.scaled_dot_product_attention(q_GMK[None], k_GLK[None], v_GLK[None], mask_ML)
    return made[0].unflatten(1, (-1, share)).transpose(0, 1).flatten(1, 2)


def _read(source: Tensor | QuantizedPages, pages: Tensor, run: int | None, length: int, dtype: torch.dtype) -> Tensor:
    """Keys or values ``[length, G, K]`` of ``pages``, in their order."""
    if isinstance(source, QuantizedPages):
        return dequantize(source.select(pages)).flatten(0, 1)[:length].to(dtype)
    if run is None:
        return source.index_select(0, pages).flatten(0, 1).narrow(0, 0, length).to(dtype)
    return source.flatten(0, 1).narrow(0, run * source.shape[1], length).to(dtype)


def _log_sum_exp(q_RHK: Tensor, k_LGK: Tensor, mask_RL: Tensor | None) -> Tensor:
    """Log-sum-exp ``[R, H]`` of the scaled scores of R rows, in fp32."""
    q_GRUK = q_RHK.float().unflatten(1, (k_LGK.shape[1], -1)).transpose(0, 1)
    scores = torch.einsum("gruk,lgk->grul", q_GRUK, k_LGK.float()) * q_RHK.shape[-1] ** -0.5
    if mask_RL is not None:
        scores = scores.masked_fill(~mask_RL[:, None], -torch.inf)
    return scores.logsumexp(-1).transpose(0, 1).flatten(1)
