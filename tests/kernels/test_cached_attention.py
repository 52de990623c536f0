"""Cached attention of PyTorch, specification and CPU path, against plain fp64 softmax attention."""

from __future__ import annotations

from random import Random
from types import ModuleType

import numpy as np
import pytest
import torch
from attention_cases import BATCHES, HEAD_DIM, HEADS, PAGE_SIZES, Case, build, plain, plain_lse
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.cached_attention import Ragged, cpu, reference
from mmserve_kernels.cached_attention import rows as lone
from mmserve_kernels.cached_attention.cpu import FLOOR, cached_attention
from mmserve_kernels.cached_attention.pieces import ALL, LOOKED_UP, ROWS, Piece, pieces

SIGHTS = ["tail", "first", "same", "all", "blocks", "any"]


def attention(case: Case) -> torch.Tensor:
    return cached_attention(case.q, case.k_pages, case.v_pages, case.ragged)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_limit", [None, "causal", "block", "tail"])
@pytest.mark.parametrize("path", [reference, cpu], ids=["reference", "cpu"])
def test_agrees_with_plain_attention_and_reads_nothing_else(
    path: ModuleType, page_size: int, heads: str, kv_limit: str | None
) -> None:
    for name, batch in BATCHES.items():
        case = build(batch, page_size, heads, kv_limit=kv_limit)
        assert case.k_pages.isnan().any(), "without poison nothing is proven"
        out = path.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged)
        assert out.shape == case.q.shape
        torch.testing.assert_close(
            out.double(), plain(case), rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_limit", [None, "causal", "block", "tail"])
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


@settings(max_examples=40)
@given(
    st.builds(lambda taken, more: 32 * taken + more, st.integers(0, 9), st.integers(1, 5)),
    st.integers(0, 100),
    st.sampled_from(["mha", "gqa"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_rows_bits_do_not_depend_on_which_rows_are_run_with_it(
    rows: int, before: int, heads: str, dtype: torch.dtype, causal: bool, tail: bool, random: Random
) -> None:
    rows = min(rows, ROWS) if causal else rows
    case = build([(rows, rows + before)], 16, heads, kv_limit="tail" if causal else None, dtype=dtype)
    query_heads, kv_heads = HEADS[heads]
    fewest = min(rows, -(-FLOOR * kv_heads // query_heads))
    count = random.randint(fewest, rows)
    chosen = sorted(random.sample(range(rows), count)) if not tail else list(range(rows - count, rows))
    whole, limits = case.ragged, case.ragged.kv_limit
    part = Ragged(
        (count,), whole.kv_lengths, whole.page_tables, whole.slots[chosen], None if limits is None else limits[chosen]
    )
    assert torch.equal(cached_attention(case.q[chosen], case.k_pages, case.v_pages, part), attention(case)[chosen])


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
@pytest.mark.parametrize("kv_limit", [None, "tail"])
@pytest.mark.parametrize("fetched", [0, cpu._FETCHED], ids=["as they are", "fetched"])
def test_pages_that_lie_in_order_are_read_where_they_are_and_change_no_bit(
    fetched: int, kv_limit: str | None, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = BATCHES["uneven"]
    gathered = attention(build(batch, 16, heads, kv_limit=kv_limit))
    monkeypatch.setattr(cpu, "_FETCHED", fetched)
    case = build(batch, 16, heads, kv_limit=kv_limit, in_order=True)
    assert None not in case.ragged.runs
    assert torch.equal(attention(case), gathered)
    # A store whose pages are not dense in memory is gathered as well.
    apart = [torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0] for x in (case.k_pages, case.v_pages)]
    assert not apart[0].is_contiguous()
    assert torch.equal(cached_attention(case.q, *apart, case.ragged), gathered)


@pytest.mark.parametrize(
    ("pages", "first"), [([4], 4), ([2, 3, 4], 2), ([2, 4, 3], None), ([4, 3, 2], None), ([], None)]
)
def test_which_pages_lie_one_behind_another(pages: list[int], first: int | None) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    ragged = Ragged((0,), (0,), (torch.tensor(pages, dtype=torch.int64),), none)
    assert ragged.runs == (first,)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [3, 150])
@pytest.mark.parametrize("blind", ["all", "the first 70"])
@pytest.mark.parametrize("path", [reference, cpu], ids=["reference", "cpu"])
def test_rows_that_see_nothing_are_zeros(path: ModuleType, blind: str, rows: int, heads: str) -> None:
    case = build([(2, 9), (rows, 200), (1, 1)], 16, heads, kv_limit="causal")
    limits = case.ragged.kv_limit
    assert limits is not None
    limits[2 : 2 + (rows if blind == "all" else 70)] = 0
    lse = torch.full(case.q.shape[:2], torch.nan)
    out = path.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse)
    seeing = limits > 0
    assert not out[~seeing].any() and lse[~seeing].eq(-torch.inf).all()
    torch.testing.assert_close(out[seeing].double(), plain(case)[seeing], rtol=2e-5, atol=2e-6)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 300), st.sampled_from(SIGHTS)), max_size=4))
def test_pieces_hold_every_row_once_and_say_what_it_sees(requests: list[tuple[int, int, str]]) -> None:
    draw = np.random.default_rng(0)
    counts, lengths, limits = [], [], []
    for rows, length, span in requests:
        count = min(rows, length)
        counts.append(count)
        lengths.append(length)
        limits.append(
            {
                "tail": np.arange(length - count, length) + 1,
                "first": np.arange(count) + 1,
                "same": np.full(count, draw.integers(0, length + 1)),
                "all": np.full(count, length),
                "blocks": np.minimum((np.arange(count) // 32 + 1) * 32, length),
                "any": draw.integers(0, length + 1, count),
            }[span]
        )
    seen = np.concatenate([*limits, np.zeros(0, np.int64)])
    told, start = [], 0
    for piece in pieces(counts, lengths, seen):
        own = seen[start : start + piece.rows]
        assert piece.rows and (own <= piece.width).all() and piece.width <= lengths[piece.request]
        if piece.span == ALL:
            assert (own == piece.width).all()
        elif piece.span != LOOKED_UP:
            assert (own == piece.span + np.arange(piece.rows)).all()
        if counts[piece.request] <= ROWS:
            assert (piece.rows, piece.width) == (counts[piece.request], lengths[piece.request])
        told += [piece.request] * piece.rows
        start += piece.rows
    assert told == np.repeat(np.arange(len(counts)), counts).tolist()


def test_rows_of_equal_or_rising_sight_need_no_limits() -> None:
    """What spares a causal prompt half of its products, and a decode step its mask."""
    assert pieces([1, 1], [40, 7], np.array([40, 3])) == (Piece(0, 1, 40, ALL), Piece(1, 1, 7, 3))
    assert pieces([130], [200], np.arange(71, 201)) == (
        Piece(0, 64, 134, 71),
        Piece(0, 64, 198, 135),
        Piece(0, 2, 200, 199),
    )
    assert pieces([100], [200], np.full(100, 150)) == (Piece(0, 100, 150, ALL),)
    assert pieces([100], [90], np.full(100, 150)) == (Piece(0, 100, 90, ALL),), "nobody sees what is not there"
    assert pieces([70], [40], np.arange(10, 80)) == (Piece(0, 64, 40, LOOKED_UP), Piece(0, 6, 40, ALL))
    assert pieces([100], [200], None) == (Piece(0, 100, 200, ALL),)
    assert pieces([100], [200], None, known=False) == (Piece(0, 100, 200, LOOKED_UP),)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_limit", [None, "causal"])
@pytest.mark.parametrize("path", [reference, cpu], ids=["reference", "cpu"])
def test_the_log_sum_exp_of_each_row_on_demand(path: ModuleType, heads: str, kv_limit: str | None) -> None:
    case = build(BATCHES["uneven"], 16, heads, kv_limit=kv_limit)
    lse = torch.full(case.q.shape[:2], torch.nan)
    out = path.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse)
    assert torch.equal(out, path.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_order", [False, True])
def test_a_row_alone_of_half_precision_is_computed_in_fp32(in_order: bool, dtype: torch.dtype) -> None:
    """Nothing is rounded but the result: what fp32 makes of the same numbers, to the last bit of ``dtype``."""
    case = build([(1, 333), (1, 40)], 16, "mha", kv_limit="causal", dtype=dtype, in_order=in_order)
    wide = cached_attention(case.q.float(), case.k_pages.float(), case.v_pages.float(), case.ragged)
    assert torch.equal(attention(case), wide.to(dtype))


@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_that_share_single_rows_change_no_bit(
    heads: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows where there are as many, else by heads; also where a row stands among requests of many."""
    before = torch.get_num_threads()
    monkeypatch.setattr(lone, "_SHARED", 0)
    batch = [(1, 333), (1, 1), (1, 40), (1, 17), (1, 64)]
    case = build(batch, 16, heads, kv_limit="causal", dtype=dtype)
    alone = build(batch[:1], 16, heads, kv_limit="causal", dtype=dtype)
    mixed = build([*batch[:2], (9, 30)], 16, heads, kv_limit="causal", dtype=dtype)
    try:
        made = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append([attention(each) for each in (case, alone, mixed)])
    finally:
        torch.set_num_threads(before)
    assert case.ragged.lone_rows is not None and mixed.ragged.lone_rows is None
    for others in made[1:]:
        assert all(torch.equal(one, other) for one, other in zip(made[0], others, strict=True))
    assert torch.equal(made[0][0][:1], made[0][1]) and torch.equal(made[0][0][:2], made[0][2][:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_rows_over_scores_of_any_size(dtype: torch.dtype) -> None:
    """Scores far apart: weights that underflow, and one that is all there is."""
    for scale in (0.0, 1e-4, 30.0, 1e4):
        case = build([(1, 100), (1, 3)], 16, "mha", dtype=dtype)
        case.q *= scale
        assert (attention(case).double() - plain(case)).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
