"""Cached attention against plain fp64 softmax attention over contiguous keys and values."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BATCHES, HEAD_DIM, HEADS, PAGE_SIZES, Case, build, plain, plain_lse
from mmserve_kernels.cached_attention import cached_attention


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


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_limit", [None, "causal"])
def test_the_log_sum_exp_of_each_row_on_demand(heads: str, kv_limit: str | None) -> None:
    case = build(BATCHES["uneven"], 16, heads, kv_limit=kv_limit)
    lse = torch.full(case.q.shape[:2], torch.nan)
    out = cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse)
    assert torch.equal(out, attention(case))
    torch.testing.assert_close(lse.double(), plain_lse(case), rtol=2e-5, atol=2e-6)


def test_a_batch_without_rows_gives_nothing() -> None:
    case = build([(0, 5), (0, 20)], 16, "gqa")
    assert attention(case).shape == (0, 6, HEAD_DIM)


def test_the_inputs_stay_as_they_are() -> None:
    case = build(BATCHES["uneven"], 16, "gqa", kv_limit="block")
    before = [t.clone() for t in (case.q, case.k_pages, case.v_pages)]
    attention(case)
    for was, now in zip(before, (case.q, case.k_pages, case.v_pages), strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num())
