"""Kernels as they are launched in production: with the block sizes of their tables, and over stores whose places are
beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import Case, build, plain
from mmserve_kernels.attention_scores import attention_scores
from mmserve_kernels.attention_scores import kernel as scores_kernel
from mmserve_kernels.cached_attention import kernel as attention_kernel
from mmserve_kernels.cached_attention.reference import cached_attention
from mmserve_kernels.kv_quant import QuantizedPages, dequantize, kv_quant
from mmserve_kernels.rope_scatter import kernel as rope_kernel
from mmserve_kernels.sparse_attention import block_index
from mmserve_kernels.sparse_attention import kernel as sparse_kernel
from triton_harness import DEVICE, assert_near, runs_kernels

pytestmark = runs_kernels
BATCH = [(5, 70), (1, 33), (0, 5)]


def on_device(case: Case) -> Case:
    r = case.ragged
    limit = None if r.kv_limit is None else r.kv_limit.to(DEVICE)
    tables = tuple(table.to(DEVICE) for table in r.page_tables)
    ragged = replace(r, page_tables=tables, slots=r.slots.to(DEVICE), kv_limit=limit)
    q, k, v = (x.to(DEVICE) for x in (case.q, case.k_pages, case.v_pages))
    return replace(case, q=q, k_pages=k, v_pages=v, ragged=ragged)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's memory is as it was left")
def test_memory_that_nobody_wrote_is_poison() -> None:
    whole = torch.zeros(3, dtype=torch.int64)
    for made in (torch.empty(3), torch.empty_like(torch.zeros(3)), whole.new_empty(3, dtype=torch.float32)):
        assert made.isnan().all()
    assert torch.empty_like(whole).eq(torch.iinfo(torch.int64).max).all()


@pytest.mark.parametrize(("dtype", "kv_block"), [(torch.float32, 64), (torch.float16, 16), (torch.bfloat16, 64)])
def test_sparse_attention_over_all_blocks_is_dense(dtype: torch.dtype, kv_block: int) -> None:
    drawn = build(BATCH, 16, "gqa", kv_limit="block", dtype=dtype)
    case = on_device(drawn)
    masks = [torch.ones(2, -(-rows // 4), -(-length // kv_block), dtype=torch.bool) for rows, length in BATCH]
    index = block_index([mask.to(DEVICE) for mask in masks], 4, kv_block)
    made = sparse_kernel.sparse_attention(case.q, case.k_pages, case.v_pages, case.ragged, index)
    assert_near(made, plain(drawn), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_of_columns(dtype: torch.dtype) -> None:
    case = on_device(build(BATCH, 16, "gqa", kv_limit="causal", dtype=dtype))
    made = scores_kernel.attention_scores(case.q, case.k_pages, case.ragged)
    single = attention_scores(case.q.float(), case.k_pages.float(), case.ragged)
    assert_near(made, single, torch.float32, scale=4)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "int4"), (torch.float16, "fp8"), (torch.bfloat16, "int8")])
def test_attention_over_quantised_pages(dtype: torch.dtype, kind: str) -> None:
    case = on_device(build(BATCH, 16, "gqa", kv_limit="causal", dtype=dtype))
    filled = torch.full((len(case.k_pages),), 16, device=DEVICE)
    k, v = (
        kv_quant(x.nan_to_num(0.0), filled, kind=kind, per=per)
        for x, per in ((case.k_pages, "channel"), (case.v_pages, "token"))
    )
    exact = cached_attention(
        case.q.float(), dequantize(k).to(dtype).float(), dequantize(v).to(dtype).float(), case.ragged
    )
    assert_near(attention_kernel.cached_attention(case.q, k, v, case.ragged), exact, dtype)


#: Of 16 positions, and of more elements than 31 bits count.
PAGE, WIDTH = 16, 64
PAGES = 2**31 // (PAGE * WIDTH) + 3


Far = Callable[[torch.dtype, int], torch.Tensor]


@pytest.fixture
def far(tmp_path: Path) -> Far:
    """Makes pages ``[PAGES, 16, 1, width]``; of a CPU's memory, and of the disk, they take what is written to."""

    def made(dtype: torch.dtype, width: int) -> torch.Tensor:
        shape = (PAGES, PAGE, 1, width)
        if DEVICE.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=DEVICE)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return torch.from_file(str(path), shared=True, size=PAGES * PAGE * width, dtype=dtype).view(shape)

    return made


def test_places_beyond_32_bits_are_read_and_written(far: Far) -> None:
    """Written by ``rope_scatter`` on a store's last pages; attention of all kinds over them."""
    draw = torch.Generator().manual_seed(0)
    rows = 20
    q = torch.randn(rows, 2, WIDTH, generator=draw).half().to(DEVICE)
    k = torch.randn(rows, 1, WIDTH, generator=draw).half().to(DEVICE)
    table = torch.tensor([PAGES - 1, PAGES - 2], device=DEVICE)
    at = torch.arange(rows, device=DEVICE)
    case = build([(rows, rows)], PAGE, "mqa").ragged
    ragged = replace(case, page_tables=(table,), slots=table[at // PAGE] * PAGE + at % PAGE)
    assert int(ragged.slots.min()) * WIDTH > 2**31
    pages = far(torch.float16, WIDTH)
    still = torch.ones(rows, 1, WIDTH, device=DEVICE), torch.zeros(rows, 1, WIDTH, device=DEVICE)  # no rotation
    rope_kernel.rope_scatter(q, k, k, *still, pages, pages, ragged.slots)  # values are the keys
    assert torch.equal(pages[table].flatten(0, 1)[:rows], k)

    near_by = replace(ragged, page_tables=(torch.arange(2, device=DEVICE),), slots=at)
    few = pages[table]
    wanted = cached_attention(q.float(), few.float(), few.float(), near_by)
    assert_near(attention_kernel.cached_attention(q, pages, pages, ragged), wanted, torch.float16)
    everything = block_index([torch.ones(1, 1, 2, dtype=torch.bool, device=DEVICE)], 64, PAGE)
    assert_near(sparse_kernel.sparse_attention(q, pages, pages, ragged, everything), wanted, torch.float16)
    sums = attention_scores(q.float(), few.float(), near_by)
    assert_near(scores_kernel.attention_scores(q, pages, ragged), sums, torch.float32, scale=4)

    exact = kv_quant(few, torch.full((2,), PAGE, device=DEVICE), kind="int8", per="token")
    assert exact.low is not None
    codes, scale, low = far(torch.uint8, WIDTH), far(torch.float32, 1), far(torch.float32, 1)
    codes[table], scale[table], low[table] = exact.codes, exact.scale, exact.low
    stored = QuantizedPages("int8", codes, scale, low)
    rounded = dequantize(exact).half().float()
    wanted = cached_attention(q.float(), rounded, rounded, near_by)
    assert_near(attention_kernel.cached_attention(q, stored, stored, ragged), wanted, torch.float16)
