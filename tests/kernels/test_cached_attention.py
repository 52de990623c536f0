"""Cached attention against plain fp64 softmax attention over contiguous keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from mmserve_kernels.cached_attention import Ragged, cached_attention, scatter

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


def build(
    batch: list[tuple[int, int]],
    page_size: int,
    heads: str,
    *,
    kv_limit: str | None = None,
    seed: int = 0,
    contents: list[int] | None = None,
) -> Case:
    """A random case. All pages start as NaN, in a random order, some of nobody; only what is written is not NaN.

    ``contents`` numbers the requests' data, so that the same request can stand in several batches.
    """
    query_heads, kv_heads = HEADS[heads]
    shuffle = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for _rows, length in batch]
    free = torch.randperm(sum(counts) + 5, generator=shuffle)
    k_pages = torch.full((len(free), page_size, kv_heads, HEAD_DIM), torch.nan)
    v_pages = k_pages.clone()
    q, keys, values, slots, limits, tables, rows = [], [], [], [], [], [], []
    for (row_count, length), pages, content in zip(batch, counts, contents or range(len(batch)), strict=True):
        data = torch.Generator().manual_seed(1000 + content)
        key = torch.randn(length, kv_heads, HEAD_DIM, generator=data)
        value = torch.randn(length, kv_heads, HEAD_DIM, generator=data)
        q.append(torch.randn(row_count, query_heads, HEAD_DIM, generator=data) * 2)
        at = torch.randperm(length, generator=data)[:row_count].sort().values
        table, free = free[:pages], free[pages:]
        slot = table[torch.arange(length) // page_size] * page_size + torch.arange(length) % page_size
        k_pages.view(-1, kv_heads, HEAD_DIM)[slot] = key
        v_pages.view(-1, kv_heads, HEAD_DIM)[slot] = value
        keys.append(key)
        values.append(value)
        slots.append(slot[at])
        limits.append(at + 1 if kv_limit == "causal" else ((at // 32 + 1) * 32).clamp(max=length))
        tables.append(table)
        rows.append(at)
    ragged = Ragged(
        row_counts=tuple(r for r, _length in batch),
        kv_lengths=tuple(length for _rows, length in batch),
        page_tables=tuple(tables),
        slots=torch.cat(slots),
        kv_limit=torch.cat(limits) if kv_limit else None,
    )
    return Case(torch.cat(q), keys, values, k_pages, v_pages, ragged, rows)


def plain(case: Case) -> torch.Tensor:
    """Softmax attention in fp64, one query row and head at a time, from its definition."""
    out = []
    start = 0
    for rows, key, value in zip(case.ragged.row_counts, case.keys, case.values, strict=True):
        for row in range(start, start + rows):
            limit = len(key) if case.ragged.kv_limit is None else int(case.ragged.kv_limit[row])
            heads = []
            for head, query in enumerate(case.q[row].double()):
                shared = head * key.shape[1] // case.q.shape[1]
                scores = key[:limit, shared].double() @ query / HEAD_DIM**0.5
                heads.append(scores.softmax(0) @ value[:limit, shared].double())
            out.append(torch.stack(heads))
        start += rows
    return torch.stack(out) if out else torch.empty(0, *case.q.shape[1:], dtype=torch.float64)


def attention(case: Case) -> torch.Tensor:
    return cached_attention(case.q, case.k_pages, case.v_pages, case.ragged)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kv_limit", [None, "causal", "block"])
def test_agrees_with_plain_attention_and_reads_nothing_else(
    batch: str, page_size: int, heads: str, kv_limit: str | None
) -> None:
    case = build(BATCHES[batch], page_size, heads, kv_limit=kv_limit)
    assert case.k_pages.isnan().any(), "without poison nothing is proven"
    out = attention(case)
    assert out.shape == case.q.shape
    torch.testing.assert_close(out.double(), plain(case), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_limit", [None, "causal", "block"])
def test_a_request_alone_is_bitwise_what_it_is_in_any_batch(heads: str, kv_limit: str | None) -> None:
    batch = BATCHES["uneven"]
    together = attention(build(batch, 16, heads, kv_limit=kv_limit))
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 3, 1]):
        shuffled = build([batch[i] for i in order], 16, heads, kv_limit=kv_limit, seed=9, contents=order)
        pieces = attention(shuffled).split([batch[i][0] for i in order])
        for index, piece in zip(order, pieces, strict=True):
            alone = attention(build([batch[index]], 16, heads, kv_limit=kv_limit, seed=5, contents=[index]))
            assert torch.equal(piece, alone)
            assert torch.equal(piece, together.split([r for r, _length in batch])[index])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_limit", [None, "causal"])
def test_the_page_size_changes_no_bit(heads: str, kv_limit: str | None) -> None:
    first, *others = [attention(build(BATCHES["uneven"], size, heads, kv_limit=kv_limit)) for size in PAGE_SIZES]
    for other in others:
        assert torch.equal(first, other)


def test_the_order_of_the_pages_changes_no_bit() -> None:
    first, *others = [attention(build(BATCHES["odd"], 7, "gqa", seed=seed)) for seed in range(4)]
    for other in others:
        assert torch.equal(first, other)


def test_a_batch_without_rows_gives_nothing() -> None:
    case = build([(0, 5), (0, 20)], 16, "gqa")
    assert attention(case).shape == (0, 6, HEAD_DIM)


def test_the_inputs_stay_as_they_are() -> None:
    case = build(BATCHES["uneven"], 16, "gqa", kv_limit="block")
    before = [t.clone() for t in (case.q, case.k_pages, case.v_pages)]
    attention(case)
    for was, now in zip(before, (case.q, case.k_pages, case.v_pages), strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_scatter_writes_each_row_to_its_own_position_and_nothing_else(page_size: int) -> None:
    case = build(BATCHES["uneven"], page_size, "gqa")
    k_pages, v_pages = case.k_pages.clone(), case.v_pages.clone()
    count = len(case.ragged.slots)
    fresh_k = torch.randn(count, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    scatter(fresh_k, -fresh_k, k_pages, v_pages, case.ragged)
    start = 0
    for table, at, key, value in zip(case.ragged.page_tables, case.rows, case.keys, case.values, strict=True):
        expected_k, expected_v = key.clone(), value.clone()
        expected_k[at], expected_v[at] = fresh_k[start : start + len(at)], -fresh_k[start : start + len(at)]
        assert torch.equal(k_pages[table].flatten(0, 1)[: len(key)], expected_k)
        assert torch.equal(v_pages[table].flatten(0, 1)[: len(value)], expected_v)
        start += len(at)
    written = k_pages.numel() - int(k_pages.isnan().sum())
    assert written == sum(key.numel() for key in case.keys), "poisoned places stay poisoned"


def test_attention_sees_what_scatter_wrote() -> None:
    case = build([(4, 9)], 4, "gqa")
    before = attention(case)
    scatter(torch.zeros(4, 2, HEAD_DIM), torch.ones(4, 2, HEAD_DIM), case.k_pages, case.v_pages, case.ragged)
    case.keys[0][case.rows[0]], case.values[0][case.rows[0]] = 0.0, 1.0
    assert not torch.allclose(attention(case), before)
    torch.testing.assert_close(attention(case).double(), plain(case), rtol=2e-5, atol=2e-6)
