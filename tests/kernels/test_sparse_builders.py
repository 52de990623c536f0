"""Builders of block masks: their definitions, and how much of the attention they keep, beside blocks at random."""

from __future__ import annotations

import pytest
import torch
from mmserve_kernels.attention_scores.reference import weights
from mmserve_kernels.sparse_attention import (
    Rows,
    best_pages,
    builders,
    page_bounds,
    query_aware,
    sink_and_window,
    vertical_slash,
)

HEADS, LENGTH, SIZE, BLOCK = 2, 1024, 32, 16


def rows_of(length: int = LENGTH, *, causal: bool = True, block: int = BLOCK) -> Rows:
    positions = torch.arange(length)
    return Rows(positions, length, positions + 1 if causal else None, block, block)


def structured(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys ``[L, HEADS, SIZE]`` whose attention has a known shape over noise."""
    generator = torch.Generator().manual_seed(11)
    q, k = (torch.randn(LENGTH, HEADS, SIZE, generator=generator) for _ in range(2))
    if kind == "needles":  # two stretches of keys that all queries look for
        q[:, :, 0] += 8
        for start in (20, 330):
            k[start : start + 12, :, 0] += 8
    elif kind == "vertical lines":  # single positions that every query looks at
        q[:, :, 0] += 8
        k[torch.tensor([2, 100, 257, 400, 555, 800]), :, 0] += 8
    elif (
        kind == "local bands"
    ):  # each position turns a little further than the last: near ones have the largest product
        angle = torch.arange(LENGTH) / 200
        turned = torch.stack([angle.cos(), angle.sin()], -1)[:, None] * 14
        q[:, :, :2], k[:, :, :2] = turned, turned
    elif kind == "blocks":  # topics that come and go: what a block's mean says well
        topics = torch.randn(8, SIZE, generator=generator) * 2
        of = torch.randint(8, (LENGTH // BLOCK,), generator=generator).repeat_interleave(BLOCK)
        q, k = q * 0.3 + topics[of][:, None], k * 0.3 + topics[of][:, None]
    return q, k


def kept(q: torch.Tensor, k: torch.Tensor, rows: Rows, mask: torch.Tensor) -> tuple[float, float]:
    """Share of the attention that the mask keeps, and share of the visible blocks that it names."""
    wide = mask.repeat_interleave(rows.q_block, 1).repeat_interleave(rows.kv_block, 2)
    wide = wide[:, : len(rows.positions), : rows.length]
    attention = weights(q, k, rows.limits(), None)
    return float((attention * wide).sum(-1).mean()), float(mask.sum() / (rows.visible().sum() * len(mask)))


def at_random(rows: Rows, density: float) -> torch.Tensor:
    """Blocks taken at random, as many of those there are, and each row's own."""
    generator = torch.Generator().manual_seed(1)
    visible = rows.visible()
    chosen = torch.rand(HEADS, *visible.shape, generator=generator) < density
    return (chosen | sink_and_window(rows, 0, 1)) & visible


def _windowed(_q: torch.Tensor, _k: torch.Tensor, rows: Rows, **numbers: int) -> torch.Tensor:
    return sink_and_window(rows, **numbers).expand(HEADS, -1, -1)


#: Structure, builder, its numbers, the least recall and the largest density it must reach.
CASES = [
    ("needles", vertical_slash, {"verticals": 24, "slashes": 2}, 0.9, 0.25),
    ("vertical lines", vertical_slash, {"verticals": 6, "slashes": 2}, 0.9, 0.35),
    ("local bands", vertical_slash, {"verticals": 0, "slashes": 80}, 0.9, 0.35),
    ("needles", query_aware, {"share": 0.9}, 0.85, 0.35),
    ("vertical lines", query_aware, {"share": 0.9}, 0.85, 0.35),
    ("local bands", query_aware, {"share": 0.9}, 0.85, 0.35),
    ("blocks", query_aware, {"share": 0.9}, 0.85, 0.35),
    ("local bands", _windowed, {"sink": 4, "window": 80}, 0.9, 0.35),
]


@pytest.mark.parametrize(("kind", "builder", "numbers", "recall", "density"), CASES)
def test_keeps_the_attention_that_there_is(kind: str, builder, numbers, recall: float, density: float) -> None:
    q, k = structured(kind)
    rows = rows_of()
    got, used = kept(q, k, rows, builder(q, k, rows, **numbers))
    chance, _ = kept(q, k, rows, at_random(rows, used))
    print(f"{kind:15} {builder.__name__:15} recall {got:.3f} at density {used:.3f}, random {chance:.3f}")
    assert got >= recall
    assert used <= density
    assert got >= chance + 0.15


def test_attention_without_structure_is_kept_too_by_taking_more_blocks() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(LENGTH, HEADS, SIZE, generator=generator) for _ in range(2))
    got, used = kept(q, k, rows_of(), query_aware(q, k, rows_of(), share=0.9))
    assert got >= 0.85
    assert used >= 0.7


@pytest.mark.parametrize("kind", ["needles", "vertical lines", "local bands", "blocks"])
def test_more_blocks_keep_more(kind: str) -> None:
    q, k = structured(kind)
    rows = rows_of()
    found = [kept(q, k, rows, query_aware(q, k, rows, share=share)) for share in (0.3, 0.6, 0.9)]
    assert [recall for recall, _ in found] == sorted(recall for recall, _ in found)
    assert [density for _, density in found] == sorted(density for _, density in found)


@pytest.mark.parametrize("kind", ["needles", "vertical lines", "local bands", "blocks"])
def test_chosen_pages_hold_the_attention_of_a_decoding_row(kind: str) -> None:
    q, k = structured(kind)
    last = Rows(torch.tensor([LENGTH - 1]), LENGTH, None, 1, 16)
    chosen = best_pages(q[-1:], *page_bounds(k, 16), 16)
    got, used = kept(q[-1:], k, last, chosen)
    assert used == 16 / 64
    chance = at_random(last, used)
    assert got >= 0.95
    assert got >= kept(q[-1:], k, last, chance)[0] + 0.2


def test_full_attention_is_probed_by_rows_spread_over_it() -> None:
    """A diagonal right of the rows: each looks at the position 100 further on."""
    generator = torch.Generator().manual_seed(4)
    places = torch.randn(LENGTH, HEADS, SIZE, generator=generator)
    q, k = places.roll(-100, 0) * 4, places
    rows = rows_of(causal=False)
    spread = torch.arange(0, LENGTH, 16)
    got, used = kept(q, k, rows, vertical_slash(q, k, rows, verticals=0, slashes=2, probes=spread))
    assert got > 0.9
    assert used < 0.1


def test_sink_and_window_by_its_definition() -> None:
    for causal in (True, False):
        rows = rows_of(83, causal=causal, block=16)
        position, other = torch.arange(83)[:, None], torch.arange(83)
        seen = other < rows.limits()[:, None]
        wanted = ((other < 20) | ((position - other).abs() < 9)) & seen
        assert torch.equal(sink_and_window(rows, 20, 9)[0], by_blocks(wanted, 16))
        assert torch.equal(sink_and_window(rows, 20, 0)[0], by_blocks((other < 20) & seen, 16))


def by_blocks(dense: torch.Tensor, block: int) -> torch.Tensor:
    """Which blocks of a boolean matrix hold anything."""
    pad = -len(dense) % block
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % block, 0, pad))
    return padded.unflatten(1, (-1, block)).any(-1).unflatten(0, (-1, block)).any(1)


def test_vertical_slash_by_its_definition() -> None:
    """Lines drawn over the whole matrix; a block counts if a line goes through it and a row sees any of it."""
    generator = torch.Generator().manual_seed(6)
    q, k = torch.randn(100, 1, 8, generator=generator) * 2, torch.randn(100, 1, 8, generator=generator)
    rows = rows_of(100, block=16)
    attention = weights(q[-64:], k, rows.limits()[-64:], None)[0]
    columns = attention.sum(0).topk(2).indices
    offset = torch.arange(36, 100)[:, None] - torch.arange(100)
    diagonals = torch.stack([attention[offset == d].sum() for d in range(100)]).topk(2).indices
    position, other = torch.arange(100)[:, None], torch.arange(100)
    drawn = torch.isin(other, columns).expand(100, -1) | torch.isin(position - other, diagonals)
    made = vertical_slash(q, k, rows, verticals=2, slashes=2)[0]
    assert torch.equal(made, by_blocks(drawn, 16) & rows.visible())


def test_a_share_is_reached_by_the_fewest() -> None:
    scores = torch.tensor([[0.1, 0.5, 0.0, 0.4], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    assert builders._by_share(scores, 0.9).tolist() == [
        [False, True, False, True],
        [True, True, True, True],
        [False, False, False, False],
    ]
    assert builders._by_share(scores, 0.45).sum(-1).tolist() == [1, 2, 0]


def test_columns_and_diagonals_reach_a_share_together() -> None:
    """Three rows: a column of 1.5 in all, a diagonal of 1.2, and little besides."""
    attention = torch.tensor([[0.5, 0.4, 0.1, 0.0], [0.5, 0.0, 0.4, 0.1], [0.5, 0.1, 0.0, 0.4]])[None]
    columns, diagonals = builders._lines_by_share(attention, torch.tensor([0, 1, 2]), 0.9)
    assert columns[0].nonzero()[:, 0].tolist() == [0]
    assert diagonals[0].nonzero()[:, 0].tolist() == [2], "one right of the middle: -1 + 4 - 1"
    columns, diagonals = builders._lines_by_share(attention, torch.tensor([0, 1, 2]), 0.4)
    assert (columns.sum(), diagonals.sum()) == (1, 0)


def test_divergence_of_jensen_and_shannon() -> None:
    p, q = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    torch.testing.assert_close(builders._jensen_shannon(p, q), torch.tensor([0.6931472, 0.0]))


@pytest.mark.parametrize("rows", [rows_of(1), rows_of(63, block=16), rows_of(100, causal=False, block=64)])
def test_builders_of_odd_lengths_name_what_is_there_and_seen(rows: Rows) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(rows.length, 4, 8, generator=generator), torch.randn(rows.length, 2, 8, generator=generator)
    visible = rows.visible()
    for mask in (vertical_slash(q, k, rows, verticals=3, slashes=3), query_aware(q, k, rows)):
        assert mask.shape == (4, *visible.shape)
        assert mask.any(-1).all(), "each block of rows looks at something"
        assert not (mask & ~visible).any()


def test_a_request_without_rows_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="empty mask"):
        Rows(torch.empty(0, dtype=torch.int64), 10)
