"""Random batches for attention over pages, poisoned where nothing was written, and their result in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mmserve_kernels.cached_attention import Ragged

HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (4, 1)}
HEAD_DIM = 16

#: (rows, kv length) of each request: odd sizes, partly filled last pages, no rows, one token, very uneven.
BATCHES = {
    "one row": [(1, 1)],
    "one row of many": [(1, 333)],
    "odd": [(63, 63), (100, 100)],
    "all rows of a long one": [(333, 333)],
    "empty among others": [(0, 40), (5, 17), (0, 1), (3, 3), (0, 16)],
    "uneven": [(1, 333), (100, 101), (2, 2), (63, 200), (1, 1)],
    "whole pages": [(32, 32), (16, 64)],
}
PAGE_SIZES = [1, 7, 16, 64]


@dataclass
class Case:
    """A batch with its contiguous keys and values, and the pages they are written to."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    ragged: Ragged
    rows: list[torch.Tensor]  # positions of each request's query rows
    window: int = 0
    cap: float = 0.0


def build(
    batch: list[tuple[int, int]],
    page_size: int,
    heads: str,
    *,
    kv_limit: str | None = None,
    seed: int = 0,
    contents: list[int] | None = None,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    in_order: bool = False,
) -> Case:
    """A random case. All pages start as NaN, in a random order (or ``in_order``: each request's one behind another),
    some of nobody; only what is written is not NaN. Rows are any of their request's positions, or with ``kv_limit``
    ``tail`` its last ones, of which each sees up to itself; with ``images``, up to the next multiple of 32, while its
    window ends with itself.

    ``contents`` numbers the requests' data, so that the same request can stand in several batches. ``keys`` and
    ``values`` are what ``dtype`` keeps of them, in fp32.
    """
    query_heads, kv_heads = HEADS[heads]
    shuffle = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for _rows, length in batch]
    free = torch.randperm(sum(counts) + 5, generator=shuffle)
    free = torch.arange(len(free)) if in_order else free
    k_pages = torch.full((len(free), page_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    v_pages = k_pages.clone()
    q, keys, values, slots, limits, tables, rows = [], [], [], [], [], [], []
    for (row_count, length), pages, content in zip(batch, counts, contents or range(len(batch)), strict=True):
        data = torch.Generator().manual_seed(1000 + content)
        key = torch.randn(length, kv_heads, head_dim, generator=data).to(dtype)
        value = torch.randn(length, kv_heads, head_dim, generator=data).to(dtype)
        q.append((torch.randn(row_count, query_heads, head_dim, generator=data) * 2).to(dtype))
        at = torch.randperm(length, generator=data)[:row_count].sort().values
        at = torch.arange(length - row_count, length) if kv_limit == "tail" else at
        table, free = free[:pages], free[pages:]
        slot = table[torch.arange(length) // page_size] * page_size + torch.arange(length) % page_size
        k_pages.view(-1, kv_heads, head_dim)[slot] = key
        v_pages.view(-1, kv_heads, head_dim)[slot] = value
        keys.append(key.float())
        values.append(value.float())
        slots.append(slot[at])
        limits.append(at + 1 if kv_limit in ("causal", "tail") else ((at // 32 + 1) * 32).clamp(max=length))
        tables.append(table)
        rows.append(at)
    ragged = Ragged(
        row_counts=tuple(r for r, _length in batch),
        kv_lengths=tuple(length for _rows, length in batch),
        page_tables=tuple(tables),
        slots=torch.cat(slots),
        kv_limit=torch.cat(limits) if kv_limit else None,
        window_end=torch.cat(rows) + 1 if kv_limit == "images" else None,
    )
    return Case(torch.cat(q), keys, values, k_pages, v_pages, ragged, rows)


def plain(case: Case) -> torch.Tensor:
    """Softmax attention in fp64 over all of each request's keys, masked."""
    return _plain(case)[0]


def plain_lse(case: Case) -> torch.Tensor:
    """Natural logarithm of the sum of exponentials of each row's scores, fp64 ``[T, H]``."""
    return _plain(case)[1]


def _plain(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    count, heads, head_dim = case.q.shape
    out, sums = torch.empty(count, heads, head_dim).double(), torch.empty(count, heads).double()
    start = 0
    for rows, key, value in zip(case.ragged.row_counts, case.keys, case.values, strict=True):
        own = slice(start, start + rows)
        shared = torch.arange(heads) * key.shape[1] // heads
        scores = torch.einsum("rhd,nhd->rhn", case.q[own].double(), key[:, shared].double()) / head_dim**0.5
        scores = case.cap * torch.tanh(scores / case.cap) if case.cap else scores
        whole = torch.full((rows,), len(key))
        limit = whole if case.ragged.kv_limit is None else case.ragged.kv_limit[own]
        end = limit if case.ragged.window_end is None else case.ragged.window_end[own]
        first = (end - case.window).clamp(min=0) if case.window else torch.zeros_like(whole)
        at = torch.arange(len(key))
        seen = (first[:, None] <= at) & (at < limit[:, None])
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        weights = scores.softmax(-1).masked_fill(~seen[:, None], 0.0)  # of a row that sees nothing, 0
        out[own] = torch.einsum("rhn,nhd->rhd", weights, value[:, shared].double())
        sums[own] = scores.logsumexp(-1)
        start += rows
    return out, sums
