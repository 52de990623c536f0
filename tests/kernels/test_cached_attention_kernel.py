"""The Triton kernel of cached attention against fp64, and its promise that nothing but a row's own data moves a bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BATCHES, HEADS, Case, build, plain, plain_lse
from hypothesis import given, settings
from hypothesis import strategies as st
from mmserve_kernels.cached_attention import kernel, tiles
from mmserve_kernels.cached_attention.tiles import Tiling
from triton_harness import DEVICE, INTERPRETED, assert_near, poisoned, runs_kernels

pytestmark = runs_kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Small blocks, so that small cases have several tiles, blocks and splits.
SMALL = Tiling(32, 32, 64, 4, 1)


def products_depend_on_the_place() -> bool:
    """Whether numpy, with which Triton's interpreter multiplies, rounds a row otherwise in another place of a tile."""
    generator = np.random.default_rng(0)
    rows, columns = (generator.standard_normal((32, 32)).astype(np.float32) for _ in range(2))
    return not np.array_equal(rows[::-1] @ columns, (rows @ columns)[::-1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "tiling", lambda *_, **__: SMALL)


def on_device(case: Case) -> Case:
    ragged = replace(
        case.ragged,
        page_tables=tuple(t.to(DEVICE) for t in case.ragged.page_tables),
        slots=case.ragged.slots.to(DEVICE),
        kv_limit=None if case.ragged.kv_limit is None else case.ragged.kv_limit.to(DEVICE),
        window_end=None if case.ragged.window_end is None else case.ragged.window_end.to(DEVICE),
    )
    return replace(
        case, q=case.q.to(DEVICE), k_pages=case.k_pages.to(DEVICE), v_pages=case.v_pages.to(DEVICE), ragged=ragged
    )


def attention(case: Case, lse: torch.Tensor | None = None) -> torch.Tensor:
    case = on_device(case)
    return kernel.cached_attention(
        case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse, window=case.window, cap=case.cap
    )


def check(case: Case) -> None:
    lse = poisoned(*case.q.shape[:2])
    out = attention(case, lse)
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    assert_near(out, plain(case), case.q.dtype, scale=max(1.0, case.cap / 10))  # a capped score is as exact as its cap
    assert_near(lse, plain_lse(case), torch.float32, scale=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_size_that_is_no_power_of_two(dtype: torch.dtype) -> None:
    check(build([(13, 100), (1, 63), (0, 5)], 16, "gqa", kv_limit="block", head_dim=80, dtype=dtype))


@pytest.mark.parametrize(
    ("batch", "page_size", "heads", "kv_limit"),
    [
        ("one row", 16, "gqa", None),
        ("one row of many", 7, "mha", "causal"),
        ("odd", 16, "mqa", "block"),
        ("all rows of a long one", 64, "gqa", "causal"),
        ("empty among others", 1, "gqa", "block"),
        ("uneven", 16, "gqa", None),
        ("whole pages", 16, "mha", None),
    ],
)
def test_agrees_with_plain_attention_and_reads_nothing_else(
    batch: str, page_size: int, heads: str, kv_limit: str | None
) -> None:
    check(build(BATCHES[batch], page_size, heads, kv_limit=kv_limit, dtype=torch.bfloat16))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_heads_and_dtypes(heads: str, dtype: torch.dtype) -> None:
    check(build([(9, 150), (2, 2)], 16, heads, kv_limit="causal", dtype=dtype))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("window", "cap", "dtype"),
    [
        pytest.param(window, cap, dtype, marks=[] if (i + j) % 3 == 0 else [pytest.mark.slow])
        for i, (window, cap) in enumerate([(1, 0.0), (40, 0.0), (0, 2.0), (70, 3.0), (1000, 50.0)])
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_windows_and_caps(window: int, cap: float, dtype: torch.dtype) -> None:
    case = build([(9, 150), (2, 2), (40, 100)], 16, "gqa", kv_limit="causal", dtype=dtype)
    check(replace(case, window=window, cap=cap))
    check(replace(build([(3, 90)], 7, "mha", dtype=dtype), window=window, cap=cap))
    check(replace(build([(9, 150), (5, 33)], 16, "gqa", kv_limit="images", dtype=dtype), window=window, cap=cap))


request = st.integers(1, 200).flatmap(lambda length: st.tuples(st.integers(0, min(length, 20)), st.just(length)))


@settings(max_examples=6)
@given(
    batch=st.lists(request, min_size=1, max_size=3).filter(lambda batch: any(rows for rows, _length in batch)),
    page_size=st.integers(1, 33),
    heads=st.sampled_from(sorted(HEADS)),
    kv_limit=st.sampled_from([None, "causal", "block"]),
    head_dim=st.sampled_from([2, 16, 24]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_batch_agrees_with_plain_attention(
    batch: list[tuple[int, int]],
    page_size: int,
    heads: str,
    kv_limit: str | None,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "tiling", lambda *_, **__: SMALL)
        check(build(batch, page_size, heads, kv_limit=kv_limit, seed=seed, head_dim=head_dim, dtype=dtype))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kv_limit", [None, "causal"])
def test_a_request_alone_is_bitwise_what_it_is_in_any_batch_on_any_pages(kv_limit: str | None) -> None:
    batch = [(1, 200), (12, 101), (2, 2), (9, 100)]
    together = attention(build(batch, 16, "gqa", kv_limit=kv_limit)).split([rows for rows, _length in batch])
    for page_size, order in ((1, [3, 1, 2, 0]), (7, [3, 3]), (64, [1])):
        shuffled = build([batch[i] for i in order], page_size, "gqa", kv_limit=kv_limit, seed=9, contents=order)
        for index, piece in zip(order, attention(shuffled).split([batch[i][0] for i in order]), strict=True):
            assert torch.equal(piece, together[index])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_many_programs_share_a_tile(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for enough in (0, 10_000):
        monkeypatch.setattr(tiles, "ENOUGH_PROGRAMS", enough)
        case = on_device(build([(9, 200), (3, 64), (5, 65)], 16, "gqa", kv_limit="block", dtype=dtype))
        plan = tiles.schedule(case.ragged, 3, 2, SMALL)
        assert bool(plan.partials) is bool(enough)
        lse = poisoned(*case.q.shape[:2])
        out = kernel.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse)
        results.append((out, lse))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(INTERPRETED and products_depend_on_the_place(), reason="so do numpy's products on this processor")
@pytest.mark.usefixtures("small")
def test_bits_do_not_depend_on_the_other_rows_of_a_request() -> None:
    case = build([(20, 150)], 16, "gqa", kv_limit="causal")
    whole = attention(case)
    some = torch.arange(3, 20, 5)
    part = replace(
        case,
        q=case.q[some],
        ragged=replace(
            case.ragged, row_counts=(len(some),), slots=case.ragged.slots[some], kv_limit=case.ragged.kv_limit[some]
        ),
    )
    assert torch.equal(attention(part), whole[some])


@pytest.mark.usefixtures("small")
def test_a_row_that_may_look_at_nothing_is_zero() -> None:
    case = build([(2, 20)], 16, "gqa", kv_limit="causal")
    case = replace(case, ragged=replace(case.ragged, kv_limit=torch.tensor([0, 20])))
    lse = poisoned(2, 6)
    out = attention(case, lse)
    assert not out[0].any()
    assert out[1].isfinite().all()
    assert lse[0].eq(-torch.inf).all()
    assert lse[1].isfinite().all()


def test_a_batch_without_rows_gives_nothing() -> None:
    assert attention(build([(0, 5), (0, 20)], 16, "gqa")).shape == (0, 6, 16)
