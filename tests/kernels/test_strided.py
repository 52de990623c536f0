"""Pages that are a view of something wider: every kernel reads what the reference reads, or says that it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, build
from mmserve_kernels import attention_scores, cached_attention, kv_quant, rope_scatter, sparse_attention
from mmserve_kernels.attention_scores import kernel as scores_kernel
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.cached_attention import kernel as attention_kernel
from mmserve_kernels.kv_quant import kernel as quant_kernel
from mmserve_kernels.rope_scatter import kernel as rope_kernel
from mmserve_kernels.sparse_attention import block_index
from mmserve_kernels.sparse_attention import kernel as sparse_kernel
from triton_harness import DEVICE, assert_near, runs_kernels

pytestmark = runs_kernels


@pytest.fixture
def case() -> Case:
    """Two requests, one without rows, over every other page of a wider tensor."""
    made = build([(5, 40), (0, 7)], 16, "gqa", kv_limit="causal")
    r = made.ragged
    assert r.kv_limit is not None
    made.ragged = replace(
        r,
        page_tables=tuple(t.to(DEVICE) for t in r.page_tables),
        slots=r.slots.to(DEVICE),
        kv_limit=r.kv_limit.to(DEVICE),
    )
    made.q = made.q.to(DEVICE)
    made.k_pages, made.v_pages = (
        torch.stack([x, torch.full_like(x, torch.nan)], 1).to(DEVICE)[:, 0] for x in (made.k_pages, made.v_pages)
    )
    assert not made.k_pages.is_contiguous()
    return made


def test_attention(case: Case) -> None:
    given = (case.q, case.k_pages, case.v_pages, case.ragged)
    wanted = cached_attention.cached_attention(*given)
    assert_near(attention_kernel.cached_attention(*given), wanted, torch.float32)
    everything = block_index([torch.ones(2, 1, 3, dtype=torch.bool), torch.ones(2, 0, 1, dtype=torch.bool)], 64, 16)
    index = replace(everything, starts=everything.starts.to(DEVICE), blocks=everything.blocks.to(DEVICE))
    assert_near(sparse_attention.sparse_attention(*given, index), wanted, torch.float32)
    assert_near(sparse_kernel.sparse_attention(*given, index), wanted, torch.float32)


def test_scores(case: Case) -> None:
    given = (case.q, case.k_pages, case.ragged)
    assert_near(scores_kernel.attention_scores(*given), attention_scores.attention_scores(*given), torch.float32)


def test_quantised(case: Case) -> None:
    filled = torch.full((len(case.k_pages),), 16, device=DEVICE)
    pages = case.k_pages.nan_to_num(0.5)
    wide = torch.stack([pages, pages], 1)[:, 0]
    for kind in ("int8", "int4", "fp8"):
        mine, theirs = (of(wide, filled, kind=kind, per="channel") for of in (quant_kernel.kv_quant, kv_quant.kv_quant))
        assert torch.equal(mine.codes, theirs.codes) and torch.equal(mine.scale, theirs.scale)


def test_what_is_written_in_place_is_refused(case: Case) -> None:
    q, kv = case.q, case.q[:, :2]
    table = torch.ones(len(q), 1, 16, device=DEVICE)
    whole = case.k_pages.contiguous()
    for pages in ((case.k_pages, whole), (whole, case.v_pages)):
        with pytest.raises(ValueError, match="must be contiguous"):
            rope_kernel.rope_scatter(q, kv, kv, table, table, *pages, case.ragged.slots)
    assert rope_scatter.rope_scatter(q, kv, kv, table, table, whole, whole.clone(), case.ragged.slots).shape == q.shape


def test_a_batch_of_nobody() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q, pages = torch.zeros(0, 6, 16, device=DEVICE), torch.zeros(3, 16, 2, 16, device=DEVICE)
    nobody = Ragged((), (), (), none)
    for op in (cached_attention, attention_kernel):
        assert op.cached_attention(q, pages, pages, nobody).shape == q.shape
    for scores in (attention_scores, scores_kernel):
        assert scores.attention_scores(q, pages, nobody).shape == (0, 6)
