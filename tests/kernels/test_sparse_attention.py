"""Attention over chosen blocks against fp64: all blocks are dense attention, few pages are chosen by bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import BATCHES, HEADS, Case, build, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.cached_attention.reference import cached_attention
from mmserve_kernels.cached_attention.tiles import Tiling
from mmserve_kernels.sparse_attention import BlockIndex, Rows, block_index, estimates, kernel, reference
from sparse_cases import page_bounds
from triton_harness import DEVICE, assert_near, runs_kernels

PATHS = [
    pytest.param(reference.sparse_attention, id="reference"),
    pytest.param(kernel.sparse_attention, id="kernel", marks=runs_kernels),
]
SHAPES = {**BATCHES, "very uneven": [(1, 200), (63, 65), (2, 2), (1, 1)]}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_tiles_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that a block of rows has several; what the kernel is to fill holds NaN."""
    monkeypatch.setattr(kernel, "_tiling", lambda *_: Tiling(64, 32, 64, 4, 1))
    monkeypatch.setattr(kernel, "_room", lambda like: torch.full_like(like, torch.nan))


def masks_of(case: Case, index_heads: int, q_block: int, kv_block: int, density: float, seed: int = 0):
    """A random mask a request."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (index_heads, -(-rows // q_block), -(-length // kv_block))
        for rows, length in zip(case.ragged.row_counts, case.ragged.kv_lengths, strict=True)
    ]
    return [torch.rand(shape, generator=generator) < density for shape in shapes]


def run(sparse_attention, case: Case, index: BlockIndex) -> torch.Tensor:
    limit = None if case.ragged.kv_limit is None else case.ragged.kv_limit.to(DEVICE)
    tables = tuple(table.to(DEVICE) for table in case.ragged.page_tables)
    ragged = replace(case.ragged, page_tables=tables, slots=case.ragged.slots.to(DEVICE), kv_limit=limit)
    there = replace(index, starts=index.starts.to(DEVICE), blocks=index.blocks.to(DEVICE))
    return sparse_attention(case.q.to(DEVICE), case.k_pages.to(DEVICE), case.v_pages.to(DEVICE), ragged, there)


def exact(case: Case, masks: list[torch.Tensor], q_block: int, kv_block: int) -> torch.Tensor:
    """From the definition, a row and a head at a time, in fp64."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    start = 0
    for rows, key, value, mask in zip(case.ragged.row_counts, case.keys, case.values, masks, strict=True):
        for row in range(rows):
            limit = len(key) if case.ragged.kv_limit is None else int(case.ragged.kv_limit[start + row])
            for head, query in enumerate(case.q[start + row].double()):
                chosen = mask[head * len(mask) // case.q.shape[1], row // q_block]
                seen = chosen.repeat_interleave(kv_block)[:limit].nonzero()[:, 0]
                shared = head * key.shape[1] // case.q.shape[1]
                scores = key[seen, shared].double() @ query / case.q.shape[2] ** 0.5
                out[start + row, head] = scores.softmax(0) @ value[seen, shared].double()
        start += rows
    return out


@pytest.mark.parametrize("sparse_attention", PATHS)
@pytest.mark.parametrize(
    ("batch", "page_size", "heads", "index_heads", "kv_limit", "q_block", "kv_block"),
    [
        ("one row", 16, "gqa", 2, None, 64, 64),
        ("one row of many", 7, "mha", 3, "causal", 32, 16),
        ("odd", 16, "mqa", 4, "block", 64, 64),
        ("empty among others", 1, "gqa", 2, "block", 3, 16),
        ("very uneven", 16, "gqa", 6, "causal", 64, 64),
        ("whole pages", 64, "gqa", 2, None, 24, 32),
    ],
)
def test_agrees_with_the_definition(
    sparse_attention,
    batch: str,
    page_size: int,
    heads: str,
    index_heads: int,
    kv_limit: str | None,
    q_block: int,
    kv_block: int,
) -> None:
    case = build(SHAPES[batch], page_size, heads, kv_limit=kv_limit)
    masks = masks_of(case, index_heads, q_block, kv_block, 0.6)
    made = run(sparse_attention, case, block_index(masks, q_block, kv_block))
    assert_near(made, exact(case, masks, q_block, kv_block), torch.float32)


@pytest.mark.parametrize("sparse_attention", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_a_head_size_that_is_no_power_of_two(sparse_attention, dtype: torch.dtype) -> None:
    case = build([(13, 100), (1, 63), (0, 5)], 16, "gqa", kv_limit="block", head_dim=24, dtype=dtype)
    masks = masks_of(case, 2, 8, 32, 0.5)
    made = run(sparse_attention, case, block_index(masks, 8, 32))
    assert made.dtype == dtype
    assert_near(made, exact(case, masks, 8, 32), dtype)


@pytest.mark.parametrize("sparse_attention", PATHS)
@pytest.mark.parametrize("kv_limit", [None, "causal"])
def test_all_blocks_are_dense_attention(sparse_attention, kv_limit: str | None) -> None:
    case = build([(63, 100), (1, 40), (0, 3)], 16, "gqa", kv_limit=kv_limit)
    made = run(sparse_attention, case, block_index(masks_of(case, 2, 64, 64, 1.1)))
    assert_near(made, plain(case), torch.float32)
    assert_near(made, cached_attention(case.q, case.k_pages, case.v_pages, case.ragged), torch.float32)


@pytest.mark.parametrize("sparse_attention", PATHS)
def test_rows_without_blocks_or_below_their_limit_are_zeros(sparse_attention) -> None:
    case = build([(40, 40), (9, 33)], 16, "mha", kv_limit="causal")
    masks = masks_of(case, 3, 16, 16, 1.1)
    masks[0][1, 2] = False
    masks[1][:, :, 0] = False
    case.ragged.kv_limit[40:44] = 12  # nothing of the second block of positions
    made = run(sparse_attention, case, block_index(masks, 16, 16))
    assert not made[32:40, 1].any()
    assert not made[40:44].any()
    assert_near(made, exact(case, masks, 16, 16), torch.float32)


@pytest.mark.parametrize("sparse_attention", PATHS)
def test_a_request_is_the_same_alone_and_among_others_bit_for_bit(sparse_attention) -> None:
    together = build([(5, 70), (9, 50), (20, 20)], 16, "gqa", contents=[0, 1, 2])
    alone = build([(9, 50)], 16, "gqa", seed=1, contents=[1])
    masks = masks_of(together, 2, 16, 16, 0.6)
    made = run(sparse_attention, together, block_index(masks, 16, 16))[5:14]
    assert torch.equal(made, run(sparse_attention, alone, block_index(masks[1:2], 16, 16)))


@settings(max_examples=8)
@given(st.data())
def test_reference_of_any_shape(data: st.DataObject) -> None:
    _any_shape(data, reference.sparse_attention)


@runs_kernels
@settings(max_examples=4)
@given(st.data())
def test_kernel_of_any_shape(data: st.DataObject) -> None:
    _any_shape(data, kernel.sparse_attention)


def _any_shape(data: st.DataObject, sparse_attention) -> None:
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    batch = [(data.draw(st.integers(0, min(length, 30))), length) for length in lengths]
    heads, limit = data.draw(st.sampled_from(sorted(HEADS))), data.draw(st.sampled_from([None, "causal", "block"]))
    case = build(batch, data.draw(st.sampled_from([1, 7, 16])), heads, kv_limit=limit)
    index_heads = data.draw(st.sampled_from([HEADS[heads][1], HEADS[heads][0]]))
    q_block, kv_block = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([16, 32, 64]))
    masks = masks_of(case, index_heads, q_block, kv_block, data.draw(st.sampled_from([0.0, 0.5, 1.1])))
    made = run(sparse_attention, case, block_index(masks, q_block, kv_block))
    assert_near(made, exact(case, masks, q_block, kv_block), torch.float32)


@pytest.mark.parametrize("sparse_attention", PATHS)
def test_decode_over_pages_chosen_by_their_bounds(sparse_attention) -> None:
    """All pages are dense attention; few of them come close where attention is sharp, and closer than others do."""
    case = build([(1, 100), (3, 333)], 16, "gqa")
    case.q *= 3
    errors = {}
    for count in (1, 8, 99):
        masks = []
        for start, rows, key in ((0, 1, case.keys[0]), (1, 3, case.keys[1])):
            own = Rows(torch.arange(len(key) - rows, len(key)), len(key), None, 3, 16)
            estimate = estimates.by_bounds(case.q[start : start + rows], *page_bounds(key, 16), own)
            masks.append(estimates.densest(estimate, own, density=count / -(-len(key) // 16)))
            assert masks[-1].shape == (2, 1, -(-len(key) // 16))
            assert masks[-1].sum(-1).tolist() == [[min(count, -(-len(key) // 16))]] * 2
        made = run(sparse_attention, case, block_index(masks, 3, 16))
        assert_near(made, exact(case, masks, 3, 16), torch.float32)
        errors[count] = float((made.cpu() - plain(case)).abs().mean())
    assert errors[99] < 1e-6 < errors[8] < errors[1]


def test_the_best_pages_of_one_row_are_those_of_the_largest_bounds() -> None:
    generator = torch.Generator().manual_seed(3)
    key, query = torch.randn(320, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    low, high = page_bounds(key, 16)
    bound = torch.maximum(low * query[0], high * query[0]).sum(-1)[:, 0]
    products = (key[:, 0] @ query[0, 0]).view(20, 16).amax(1)
    assert (bound >= products - 1e-5).all()
    last = Rows(torch.tensor([319]), 320, None, 1, 16)
    mask = estimates.densest(estimates.by_bounds(query, low, high, last), last, density=5 / 20)
    assert mask[0, 0].nonzero()[:, 0].tolist() == sorted(bound.argsort(descending=True)[:5].tolist())


def test_an_index_that_does_not_fit_is_refused() -> None:
    case = build([(20, 40)], 16, "gqa")
    mask = torch.ones(2, 2, 3, dtype=torch.bool)
    for index, message in (
        (block_index([mask], 16, 24), "power of two"),
        (block_index([mask[:1]], 16, 16), "index heads"),
        (block_index([mask], 32, 16), "starts must be"),
    ):
        with pytest.raises(ValueError, match=message):
            run(reference.sparse_attention, case, index)
