"""Attention of a batch in tensors of fixed shapes: the rows of a ragged batch, and no question to the device."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from attention_cases import BATCHES, Case, build, plain, plain_lse
from mmserve_kernels.cached_attention import FixedBatch, cpu, kernel, reference, tiles
from mmserve_kernels.cached_attention.tiles import Tiling
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.utils.rnn import pad_sequence
from triton_harness import DEVICE, poisoned, runs_kernels

#: Small blocks, so that small cases have several tiles, blocks and splits.
SMALL = Tiling(32, 32, 64, 4, 1)
PAGE = 16


def fixed(case: Case, *, rows: int = 3, requests: int = 2, pages: int = 3) -> tuple[torch.Tensor, FixedBatch]:
    """Queries and batch of ``case`` with room for so many more of each, and poison where nobody may look."""
    ragged = case.ragged
    limits = ragged.kv_limit
    if limits is None:
        limits = torch.from_numpy(np.repeat(ragged.kv_lengths, ragged.row_counts))
    table = pad_sequence(list(ragged.page_tables), batch_first=True)
    batch = FixedBatch(
        *(torch.tensor([*of, *[0] * requests]) for of in (ragged.row_counts, ragged.kv_lengths)),
        torch.nn.functional.pad(table, (0, pages, 0, requests)),
        torch.nn.functional.pad(ragged.slots, (0, rows)),
        torch.nn.functional.pad(limits, (0, rows)),
    )
    q = torch.cat([case.q, case.q.new_full((rows, *case.q.shape[1:]), torch.nan)])
    return q.to(DEVICE), FixedBatch(*(t.to(DEVICE) for t in vars(batch).values()))


@pytest.mark.parametrize("kv_limit", [None, "causal", "block"])
@pytest.mark.parametrize("batch", ["one row", "empty among others", "uneven", "whole pages"])
@pytest.mark.parametrize("path", [reference, cpu], ids=["reference", "cpu"])
def test_pytorch_gives_plain_attention_and_zeros_after_it(path: ModuleType, batch: str, kv_limit: str | None) -> None:
    case = build(BATCHES[batch], PAGE, "gqa", kv_limit=kv_limit)
    q, room = fixed(case)
    pages = [t.to(DEVICE) for t in (case.k_pages, case.v_pages)]
    lse = poisoned(*q.shape[:2])
    out = path.cached_attention(q, *pages, room, lse_TH=lse).cpu()
    count, lse = len(case.q), lse.cpu()
    torch.testing.assert_close(out[:count].double(), plain(case), rtol=2e-5, atol=2e-6)
    assert not out[count:].any()
    torch.testing.assert_close(lse[:count].double(), plain_lse(case), rtol=2e-5, atol=2e-6)
    assert lse[count:].eq(-torch.inf).all()


@runs_kernels
@pytest.mark.parametrize("enough", [0, 10_000], ids=["whole tiles", "split tiles"])
@pytest.mark.parametrize("kv_limit", [None, "causal"])
def test_the_kernel_gives_the_bits_of_the_ragged_batch(
    kv_limit: str | None, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "tiling", lambda *_, **__: SMALL)
    monkeypatch.setattr(tiles, "ENOUGH_PROGRAMS", enough)
    case = build([(13, 150), (0, 20), (1, 64), (3, 3)], PAGE, "gqa", kv_limit=kv_limit)
    pages = [t.to(DEVICE) for t in (case.k_pages, case.v_pages)]
    q, room = fixed(case)
    plan = tiles.fixed_schedule(room, case.q.shape[1] // pages[0].shape[2], pages[0].shape[2], SMALL, PAGE)
    assert bool(plan.partials) is bool(enough)
    lse, ragged_lse = poisoned(*q.shape[:2]), poisoned(*case.q.shape[:2])
    out = kernel.cached_attention(q, *pages, room, lse_TH=lse)
    ragged = replace(
        case.ragged,
        page_tables=tuple(t.to(DEVICE) for t in case.ragged.page_tables),
        slots=case.ragged.slots.to(DEVICE),
        kv_limit=None if case.ragged.kv_limit is None else case.ragged.kv_limit.to(DEVICE),
    )
    expected = kernel.cached_attention(case.q.to(DEVICE), *pages, ragged, lse_TH=ragged_lse)
    count = len(case.q)
    assert expected.isfinite().all()
    assert torch.equal(out[:count], expected)
    assert torch.equal(lse[:count], ragged_lse)
    assert not out[count:].any() and lse[count:].eq(-torch.inf).all()


@pytest.mark.parametrize("enough", [0, 10_000], ids=["whole tiles", "split tiles"])
@pytest.mark.parametrize("batch", ["one row", "empty among others", "uneven", "whole pages"])
def test_the_programs_are_those_of_the_ragged_batch_and_some_of_no_rows(
    batch: str, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever room there is: every tile is run once, over all of its splits, each of which has a place of its own."""
    monkeypatch.setattr(tiles, "ENOUGH_PROGRAMS", enough)
    case = build(BATCHES[batch], PAGE, "gqa")
    wanted = tiles.schedule(case.ragged, 3, 2, SMALL)
    made = tiles.fixed_schedule(fixed(case)[1], 3, 2, SMALL, PAGE)

    def work(plan: tiles.Schedule) -> list[tuple[int, ...]]:
        """First row, rows, first packed row and positions of a tile, and one of its splits."""
        spans = [(p[:3] + p[4:5], p[5], p[6]) for p in plan.programs.tolist() if p[1] > p[2] // 3]
        return sorted((*tile, split) for tile, begin, end in spans for split in range(begin, end))

    assert work(made) == work(wanted)
    places = [p[7] for p in made.programs.tolist() if p[7] >= 0]
    assert len(set(places)) == len(places) and max(places, default=-1) < max(made.partials, 1)
    of_tile = {tuple(p[:3]): p[7] - p[5] for p in made.programs.tolist() if p[7] >= 0}
    for *tile, place, _splits, _, _, _ in made.folds.tolist():
        assert tile[1] <= tile[2] // 3 or of_tile[tuple(tile)] == place


def test_nothing_is_asked_of_the_device() -> None:
    """Tensors without contents know their shapes and nothing else: whoever asks for a number is found out."""
    with FakeTensorMode():
        whole = [torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)]
        batch = FixedBatch(
            *whole, torch.zeros(4, 9, dtype=torch.int64), *(torch.zeros(24, dtype=torch.int64) for _ in range(2))
        )
        q, pages = torch.zeros(24, 6, 16), torch.zeros(20, PAGE, 2, 16)
        assert cpu.cached_attention(q, pages, pages, batch).shape == q.shape
        for enough in (128, 10_000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiles, "ENOUGH_PROGRAMS", enough)
                plan = tiles.fixed_schedule(replace(batch), 3, 2, SMALL, PAGE)
        assert plan.programs.shape == ((24 * 3 // 32 + 4) * 3, 8) and plan.folds.shape == (24 * 3 // 32 + 4, 8)
        with pytest.raises(DataDependentOutputException):
            batch.row_counts.tolist()
