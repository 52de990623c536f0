"""Estimates of attention by block: how much of it the densest blocks keep, and each one's definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from mmserve_kernels.attention_scores.reference import weights
from mmserve_kernels.sparse_attention import Rows, estimates, sink_and_window
from sparse_cases import BLOCK, HEADS, LENGTH, at_random, kept, page_bounds, rows_of, structured

Estimate = Callable[[torch.Tensor, torch.Tensor, Rows], torch.Tensor]


def by_bounds(q: torch.Tensor, k: torch.Tensor, rows: Rows) -> torch.Tensor:
    return estimates.by_bounds(q, *page_bounds(k, rows.kv_block), rows)


def by_channels(q: torch.Tensor, k: torch.Tensor, rows: Rows) -> torch.Tensor:
    return estimates.by_channels(q, k, rows, channels=8)


def by_distance(_q: torch.Tensor, _k: torch.Tensor, rows: Rows) -> torch.Tensor:
    return estimates.by_distance(rows).expand(HEADS, -1, -1)


#: What each finds, at a quarter of the blocks.
FINDS: list[tuple[Estimate, tuple[str, ...]]] = [
    (estimates.by_lines, ("needles", "vertical lines", "local bands")),
    (estimates.by_means, ("needles", "vertical lines", "local bands", "blocks")),
    (estimates.by_segments, ("needles", "vertical lines", "local bands", "blocks")),
    (by_bounds, ("needles", "vertical lines", "local bands", "blocks")),
    (by_channels, ("needles", "vertical lines", "local bands", "blocks")),
    (estimates.by_attention, ("needles", "vertical lines", "local bands", "blocks")),
    (by_distance, ("local bands",)),
]
CASES = [(estimate, kind) for estimate, kinds in FINDS for kind in kinds]


@cache
def attention(kind: str) -> torch.Tensor:
    """Attention by block of the causal rows of a structure ``[HEADS, B, C]``, of each block of rows 1 in all."""
    rows = rows_of()
    by_block = estimates.by_attention(*structured(kind), rows)
    return by_block / by_block.sum(-1, keepdim=True)


def recall(kind: str, mask: torch.Tensor) -> float:
    """Share of the attention that a mask keeps."""
    return float((attention(kind) * mask).sum(-1).mean())


@cache
def by_chance(kind: str, density: float) -> float:
    """Share of the attention that so many blocks keep that are taken at random, and each row's own."""
    return recall(kind, at_random(rows_of(), density))


@pytest.mark.parametrize(("estimate", "kind"), CASES)
def test_a_quarter_of_the_blocks_keeps_the_attention_that_there_is(estimate: Estimate, kind: str) -> None:
    q, k = structured(kind)
    rows = rows_of()
    made = estimate(q, k, rows)
    found = []
    for density in (0.5, 0.25, 0.125):
        mask = estimates.densest(made, rows, density=density)
        assert mask.sum() <= (density + 0.05) * rows.visible().sum() * len(mask), "rounded up, for each block of rows"
        found.append((recall(kind, mask), by_chance(kind, density)))
    name = estimate.__name__.removeprefix("by_")
    print(f"{kind:15} {name:10}" + "".join(f" {got:.3f} (random {chance:.3f})" for got, chance in found))
    assert found[1][0] >= 0.8
    assert all(got >= chance + 0.15 for got, chance in found)


def test_all_blocks_at_density_and_mass_1_and_fewer_below() -> None:
    q, k = structured("needles")
    for rows in (rows_of(), rows_of(causal=False)):
        estimate = estimates.by_attention(q, k, rows)
        whole = estimates.densest(estimate, rows)
        assert torch.equal(whole, rows.visible().expand_as(whole))
        half = estimates.densest(estimate, rows, density=0.5)
        both = estimates.densest(estimate, rows, density=0.5, mass=0.6)
        assert torch.equal(half.sum(-1), (rows.visible().sum(-1) * 0.5).ceil().long().expand_as(half.sum(-1)))
        assert not (both & ~half).any()
        assert both.sum() < half.sum() < whole.sum()
        assert both.any(-1).all()


def test_nothing_but_the_estimate_says_which_blocks_but_every_row_sees_one() -> None:
    """Rows that begin in the middle of a block: the last block of a block of rows is not there for its first rows."""
    positions = torch.arange(24, 56)
    rows = Rows(positions, 56, positions + 1, 16, 16)
    estimate = torch.tensor([[[0.1, 0.6, 0.3, 0.0], [0.1, 0.2, 0.3, 0.4]]])
    low, high = estimates.densest(estimate, rows, density=0.1)[0]
    assert low.tolist() == [False, True, False, False], "all rows from 24 on see some of 16 to 31"
    assert high.tolist() == [True, False, False, True], "48 and on is seen by the last eight rows only"


def test_the_sink_and_a_window_are_two_blocks_at_least() -> None:
    rows = rows_of(100, block=16)
    near = estimates.densest(estimates.by_distance(rows), rows, density=0.01, least=2)[0]
    assert torch.equal(near, sink_and_window(rows, 1, 1)[0])
    massless = estimates.densest(estimates.by_distance(rows), rows, mass=1e-6, least=2)[0]
    assert torch.equal(massless, near)


def test_a_diagonal_counts_where_it_runs_and_a_column_is_no_diagonal() -> None:
    """Every row looks at the first position and at the one 36 before its own, half and half."""
    generator = torch.Generator().manual_seed(5)
    length = 160
    places = F.normalize(torch.randn(length, 1, 256, generator=generator), dim=-1) * 16
    k = places.clone()
    k[0] = 0
    q = places.roll(36, 0)
    k[:, :, 0], q[:, :, 0] = 0, 16
    k[0, :, 0] = 16
    rows = rows_of(length, block=16)
    estimate = estimates.by_lines(q, k, rows)[0]
    true = estimates.by_attention(q, k, rows)[0]
    assert float(estimates.by_attention(q, k, rows)[0, 9, 0]) == pytest.approx(8, abs=0.5)
    late = slice(5, None)  # rows that see both
    torch.testing.assert_close(estimate[late], true[late] / true[late].sum(-1, keepdim=True), atol=0.02, rtol=0)


def test_the_share_of_the_attention_that_was_asked_for_is_held() -> None:
    """With the attention itself as the estimate, nothing is to be guessed."""
    q, k = structured("blocks")
    rows = rows_of()
    for mass in (0.5, 0.8, 0.95):
        mask = estimates.densest(estimates.by_attention(q, k, rows), rows, mass=mass)
        assert kept(q, k, rows, mask)[0] >= mass


def test_attention_by_block_is_the_attention_summed() -> None:
    q, k = torch.randn(40, 4, 8), torch.randn(40, 2, 8)
    rows = rows_of(40, block=16)
    attention = weights(q, k, rows.limits(), None)  # [4, 40, 40]
    wanted = torch.zeros(2, 3, 3)
    for head in range(4):
        for row in range(40):
            for position in range(40):
                wanted[head // 2, row // 16, position // 16] += attention[head, row, position]
    torch.testing.assert_close(estimates.by_attention(q, k, rows), wanted)
    every = estimates.by_channels(q, k, rows, channels=8)
    torch.testing.assert_close(every, wanted, msg="with all channels nothing is reduced")


def test_the_channels_that_count_have_the_largest_products() -> None:
    q, k = torch.randn(32, 2, 8), torch.randn(32, 2, 8)
    q[:, :, 3], k[:, :, 5] = 40, -30
    rows = rows_of(32, block=16)
    only = torch.zeros(8)
    only[[3, 5]] = 1
    torch.testing.assert_close(estimates.by_channels(q, k, rows, channels=2), estimates.by_attention(q * only, k, rows))


def test_a_segment_is_judged_by_its_extremes() -> None:
    q, k = torch.randn(32, 1, 4), torch.randn(48, 1, 4)
    rows = Rows(torch.arange(16, 48), 48, None, 16, 16)
    own = torch.tensor([[False, True, False], [False, False, True]])
    scores = torch.empty(2, 3)
    for b in range(2):
        for c in range(3):
            of, at = q[b * 16 : b * 16 + 16, 0], k[c * 16 : c * 16 + 16, 0]
            middle = (of.amax(0) + of.amin(0)) / 2
            scores[b, c] = max(middle @ at.amax(0), middle @ at.amin(0))
    others = scores.masked_fill(own, -torch.inf).softmax(-1)
    torch.testing.assert_close(estimates.by_segments(q, k, rows)[0], (own + others) / 2, msg="its own comes first")


@pytest.mark.parametrize("rows", [rows_of(1), rows_of(63), rows_of(100, causal=False, block=64)])
@pytest.mark.parametrize("estimate", [estimate for estimate, _ in FINDS if estimate is not by_distance])
def test_estimates_of_odd_lengths_and_shared_heads_are_of_what_is_seen(rows: Rows, estimate: Estimate) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(rows.length, 4, 8, generator=generator), torch.randn(rows.length, 2, 8, generator=generator)
    made = estimate(q, k, rows)
    visible = rows.visible()
    assert made.shape[0] in (2, 4)
    assert made.shape[1:] == visible.shape
    assert (made >= 0).all()
    assert (made[:, ~visible] == 0).all()
    assert made.isfinite().all()


def test_random_and_near_blocks_need_no_keys() -> None:
    rows = rows_of(LENGTH, block=BLOCK)
    assert torch.equal(estimates.at_random(rows, 3), estimates.at_random(rows, 3))
    assert not torch.equal(estimates.at_random(rows, 3), estimates.at_random(rows, 4))
    near = estimates.by_distance(rows)[0, 20]
    assert near[0] == near[20] == near.max()
    assert (near[1:20].diff() > 0).all()
    own = estimates.densest(estimates.at_random(rows, 3), rows, density=0.01)[0]
    assert own.diagonal().all()


def test_divergence_of_jensen_and_shannon() -> None:
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    torch.testing.assert_close(estimates._jensen_shannon(p, q), torch.tensor([0.6931472, 0.0]))
