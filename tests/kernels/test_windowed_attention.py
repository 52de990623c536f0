"""Attention within a sliding window, or of capped scores, of PyTorch: against plain fp64 softmax attention."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from attention_cases import BATCHES, HEADS, Case, build, plain
from mmserve_kernels.cached_attention import FixedBatch, Ragged, cpu, reference

KINDS = {"window of 1": (1, 0.0), "window": (37, 0.0), "cap": (0, 2.0), "both": (50, 3.0), "wide": (1000, 30.0)}


def special(case: Case, kind: str, path: ModuleType = cpu) -> torch.Tensor:
    window, cap = KINDS[kind]
    made: torch.Tensor = path.cached_attention(case.q, case.k_pages, case.v_pages, case.ragged, window=window, cap=cap)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_limit", [None, "causal", "tail", "images"])
@pytest.mark.parametrize("path", [reference, cpu], ids=["reference", "cpu"])
def test_agrees_with_plain_attention_and_reads_nothing_else(
    path: ModuleType, heads: str, kv_limit: str | None, kind: str
) -> None:
    window, cap = KINDS[kind]
    for name, batch in BATCHES.items():
        case = replace(build(batch, 16, heads, kv_limit=kv_limit), window=window, cap=cap)
        made = special(case, kind, path).double()
        torch.testing.assert_close(made, plain(case), rtol=2e-5, atol=4e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_which_rows_of_its_page_are_run_with_it(kind: str, dtype: torch.dtype) -> None:
    """As the store cuts requests: rows whose visible positions end in one page, up to that page's end."""
    case = build([(16, 80), (1, 1), (16, 176)], 16, "gqa", kv_limit="tail", dtype=dtype, in_order=True)
    whole, limits = special(case, kind), case.ragged.kv_limit
    assert limits is not None
    for first, last in ((0, 4), (3, 9), (8, 16)):
        part = Ragged(
            (last - first,), (80,), case.ragged.page_tables[:1], case.ragged.slots[first:last], limits[first:last]
        )
        assert torch.equal(special(replace(case, q=case.q[first:last], ragged=part), kind), whole[first:last])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_fixed_size(kind: str) -> None:
    case = build([(3, 60), (2, 33)], 16, "gqa", kv_limit="tail")
    limits = case.ragged.kv_limit
    assert limits is not None
    tables = torch.zeros(3, 4, dtype=torch.int64)
    for row, table in enumerate(case.ragged.page_tables):
        tables[row, : len(table)] = table
    fixed = FixedBatch(torch.tensor([3, 2, 0]), torch.tensor([60, 33, 0]), tables, case.ragged.slots, limits)
    made = special(replace(case, ragged=fixed), kind)  # type: ignore[arg-type]
    torch.testing.assert_close(made, special(case, kind), rtol=2e-5, atol=4e-6)


def test_log_sum_exps_of_windows_are_not_made_up() -> None:
    case = build([(3, 60)], 16, "gqa", kv_limit="tail")
    with pytest.raises(ValueError, match="log-sum-exps of windowed or capped attention"):
        cpu.cached_attention(
            case.q, case.k_pages, case.v_pages, case.ragged, window=4, lse_TH=torch.empty(case.q.shape[:2])
        )
