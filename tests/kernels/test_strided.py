"""Tensors that are views of something wider, and batches of more rows than a GPU has programs of one kind: every kernel
reads what the reference reads, or says that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from attention_cases import Case, build
from mmserve_kernels import attention_scores, kv_quant, rope_scatter, sparse_attention
from mmserve_kernels.attention_scores import kernel as scores_kernel
from mmserve_kernels.cached_attention import Ragged
from mmserve_kernels.cached_attention import cpu as attention_cpu
from mmserve_kernels.cached_attention import kernel as attention_kernel
from mmserve_kernels.cached_attention import reference as attention_reference
from mmserve_kernels.commit_scores import kernel as commit_kernel
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
    wanted = attention_reference.cached_attention(*given)
    assert_near(attention_cpu.cached_attention(*given), wanted, torch.float32)
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


def every_other(x: torch.Tensor) -> torch.Tensor:
    """``x`` as every other element of a tensor of impossible ones."""
    wide = torch.stack([x, torch.full_like(x, -(1 << 20))], 1)
    assert not wide[:, 0].is_contiguous() or len(x) < 2
    return wide[:, 0]


def test_integers_that_lie_apart(case: Case) -> None:
    """Limits, slots, filled positions, lists of blocks, and banned tokens."""
    r = case.ragged
    assert r.kv_limit is not None
    apart = replace(r, kv_limit=every_other(r.kv_limit), slots=every_other(r.slots))
    given = (case.q, case.k_pages, case.v_pages)
    assert torch.equal(attention_kernel.cached_attention(*given, apart), attention_kernel.cached_attention(*given, r))
    scores = scores_kernel.attention_scores
    assert torch.equal(scores(*given[:2], apart), scores(*given[:2], r))
    index = block_index([torch.ones(2, 1, 3, dtype=torch.bool), torch.ones(2, 0, 1, dtype=torch.bool)], 64, 16)
    index = replace(index, starts=index.starts.to(DEVICE), blocks=index.blocks.to(DEVICE))
    listed = replace(index, starts=every_other(index.starts), blocks=every_other(index.blocks))
    sparse = sparse_kernel.sparse_attention
    assert torch.equal(sparse(*given, apart, listed), sparse(*given, r, index))
    pages = case.k_pages.nan_to_num(0.5).contiguous()
    filled = torch.arange(len(pages), device=DEVICE) % 17
    mine, theirs = (quant_kernel.kv_quant(pages, x, kind="int8", per="channel") for x in (every_other(filled), filled))
    assert torch.equal(mine.codes, theirs.codes)
    table, kv = torch.ones(len(case.q), 1, 16, device=DEVICE), case.q[:, :2]
    written = [torch.zeros_like(pages) for _ in range(4)]
    for k, v, slots in ((*written[:2], apart.slots), (*written[2:], r.slots)):
        rope_kernel.rope_scatter(case.q, kv, kv, table, table, k, v, slots)
    assert torch.equal(written[0], written[2]) and torch.equal(written[1], written[3]) and written[0].any()
    logits, banned = torch.arange(70.0, device=DEVICE).view(2, 35), torch.tensor([34, 33, 2], device=DEVICE)
    assert commit_kernel.commit_scores(logits, banned=every_other(banned)).ids.tolist() == [[32], [32]]


def test_a_log_sum_exp_that_cannot_be_filled_in_place_is_refused(case: Case) -> None:
    room = torch.zeros(*case.q.shape[:2], 2, device=DEVICE)
    for lse in (room[..., 0], room[..., 0].half()):
        with pytest.raises(ValueError, match="contiguous, and fp32"):
            attention_kernel.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, lse_TH=lse)


@pytest.mark.parametrize("op", ["attention_scores", "cached_attention", "commit_scores", "kv_quant", "rope_scatter"])
def test_rows_are_no_programs_of_a_second_kind(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those a GPU takes at most 65,535, and of the first kind 2³¹: what grows with a batch is of the first."""
    grids: dict[str, list[tuple[int, ...]]] = {}

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.setdefault(self.name, []).append(grid)
            return lambda *_, **__: None

    module = import_module(f"mmserve_kernels.{op}.kernel")
    for name in LAUNCHED[op]:
        monkeypatch.setattr(module, name, Launched(name))
    for rows in (256, 1280):
        run_with(op, rows)
    for few, many in grids.values():
        assert few[1:] == many[1:] and few[0] < many[0], grids
    assert set(grids) == set(LAUNCHED[op])


LAUNCHED = {
    "attention_scores": ("_log_sum_exp", "_column_sums"),
    "cached_attention": ("_attend", "_combine"),
    "commit_scores": ("_chunk", "_join"),
    "kv_quant": ("_quantize",),
    "rope_scatter": ("_rope_scatter",),
}


def run_with(op: str, rows: int) -> None:
    """Launch ``op`` for so many rows, or pages, of whatever they hold."""
    q, pages = torch.zeros(rows, 2, 16, device=DEVICE), torch.zeros(rows, 16, 2, 16, device=DEVICE)
    places = torch.arange(rows, device=DEVICE)
    ragged = Ragged((rows,), (rows * 16,), (places,), places)
    match op:
        case "attention_scores":
            scores_kernel.attention_scores(q, pages, ragged)
        case "cached_attention":
            attention_kernel.cached_attention(q, pages, pages, ragged)
        case "commit_scores":
            commit_kernel.commit_scores(torch.zeros(rows, 9000, device=DEVICE))
        case "kv_quant":
            quant_kernel.kv_quant(pages, places, kind="int8", per="token")
        case "rope_scatter":
            table = torch.ones(rows, 1, 16, device=DEVICE)
            rope_kernel.rope_scatter(q, q, q, table, table, pages, pages.clone(), places)


def test_a_batch_of_nobody() -> None:
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q, pages = torch.zeros(0, 6, 16, device=DEVICE), torch.zeros(3, 16, 2, 16, device=DEVICE)
    nobody = Ragged((), (), (), none)
    for op in (attention_reference, attention_cpu, attention_kernel):
        assert op.cached_attention(q, pages, pages, nobody).shape == q.shape
    for scores in (attention_scores, scores_kernel):
        assert scores.attention_scores(q, pages, nobody).shape == (0, 6)
