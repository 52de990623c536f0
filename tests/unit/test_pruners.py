"""Each pruner against its paper's rule, written out plainly; and what holds for all of them."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import ask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmserve.core.request import Amount, Vision
from mmserve.errors import InvalidArgument
from mmserve.prune import PRUNERS, pruner_of
from mmserve.prune.base import Evidence, GridView, Plan, counts, mass_count
from mmserve.prune.cls_attention import ClsAttention
from mmserve.prune.column_attention import ColumnAttention
from mmserve.prune.fastv import FastV
from mmserve.prune.hired import Hired, allocate
from mmserve.prune.mustdrop import MustDrop
from mmserve.prune.random import Random
from mmserve.prune.resize import Resize, coarser
from mmserve.prune.tome import ToMe
from mmserve.prune.visionzip import VisionZip


def ratio(value: float) -> Amount:
    return Amount("keep_ratio", value)


def budget(value: int) -> Amount:
    return Amount("token_budget", value)


def view(rows: int, columns: int, seed: int = 0) -> GridView:
    """A grid whose evidence is all there, and random."""
    generator = torch.Generator().manual_seed(seed)
    n = rows * columns
    return GridView(
        rows,
        columns,
        {
            Evidence.CLS_ROW: torch.rand(n, generator=generator) / n,
            Evidence.FIRST_CLS_ROW: torch.rand(n, generator=generator) / n,
            Evidence.LAST_CLS_ROW: torch.rand(n, generator=generator) / n,
            Evidence.COLUMN_MEANS: torch.rand(n, generator=generator) / n,
            Evidence.LAST_ROW: torch.rand(n, generator=generator) / n,
            Evidence.MASK_ROWS: torch.rand(n, generator=generator) / n,
            Evidence.KEYS: torch.randn(n, 8, generator=generator),
            Evidence.FIRST_FEATURES: torch.randn(n, 8, generator=generator) + 1,
        },
    )


@given(
    st.sampled_from(sorted(PRUNERS)),
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4),
    st.one_of(st.floats(0.01, 1).map(ratio), st.integers(1, 120).map(budget)),
)
def test_what_a_plan_is(name: str, grids: list[tuple[int, int]], amount: Amount) -> None:
    views = [view(rows, columns, i) for i, (rows, columns) in enumerate(grids)]
    plans = PRUNERS[name]().plans(views, amount)
    sizes = [one.size for one in views]
    kept = [len(plan.places) for plan in plans]
    wanted = sum(counts(sizes, amount))
    assert sum(kept) <= wanted if name in ("mustdrop", "resize", "hired") else sum(kept) == wanted
    for plan, size in zip(plans, sizes, strict=True):
        assert plan.places.dtype == torch.int64 and bool((plan.places.diff() > 0).all())
        assert all(0 <= place < size for place in plan.places.tolist())
        if plan.weights is not None:
            assert plan.weights.shape == (len(plan.places), size) and bool((plan.weights >= 0).all())
            sums = plan.weights.sum(1)
            if name == "visionzip":  # a target and the mean of the others
                assert bool(torch.isclose(sums[:, None], torch.tensor([1.0, 2.0]), atol=1e-5).any(1).all())
            else:
                assert torch.allclose(sums, torch.ones(len(plan.places)))
        tokens = torch.randn(size, 3)
        assert plan.apply(tokens).shape == (len(plan.places), 3)
        if len(plan.places) == size and name != "mustdrop":
            assert torch.allclose(plan.apply(tokens), tokens, atol=1e-6), "nothing is lost, so nothing changes"


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(1, 500))
def test_a_budget_is_spread_evenly(sizes: list[int], tokens: int) -> None:
    kept = counts(sizes, budget(tokens))
    assert sum(kept) == min(tokens, sum(sizes))
    for size, count in zip(sizes, kept, strict=True):
        assert abs(count - size * min(1, tokens / sum(sizes))) <= 1 and count <= size


@pytest.mark.parametrize(("share", "kept"), [(1, 81), (0.5, 41), (0.25, 20), (0.125, 10), (0.05, 4), (0.001, 1)])
def test_a_ratio_of_81(share: float, kept: int) -> None:
    assert counts([81], ratio(share)) == [kept]


def by_hand(scores: Tensor, count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:count])


@pytest.mark.parametrize(
    ("kind", "evidence"), [(ClsAttention, Evidence.CLS_ROW), (ColumnAttention, Evidence.COLUMN_MEANS)]
)
def test_the_highest_scores_stay(kind: Callable[[], ClsAttention], evidence: Evidence) -> None:
    views = [view(5, 4), view(5, 4, 1)]
    plans = kind().plans(views, budget(7))
    assert [p.places.tolist() for p in plans] == [
        by_hand(one[evidence], c) for one, c in zip(views, (3, 4), strict=True)
    ]
    assert all(p.weights is None for p in plans)
    [whole] = kind().plans(views[:1], Amount("attention_mass", 0.6))
    scores = views[0][evidence]
    least = next(k for k in range(1, 21) if scores[by_hand(scores, k)].sum() >= 0.6 * scores.sum())
    assert whole.places.tolist() == by_hand(scores, least)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_smallest_set_of_a_mass(values: list[float], mass: float) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    count = mass_count(scores.numpy(), mass)
    ordered = scores.double().sort(descending=True).values
    assert 1 <= count <= len(values)
    assert ordered[:count].sum() >= mass * ordered.sum() * (1 - 1e-9)
    assert count == 1 or ordered[: count - 1].sum() < mass * ordered.sum() * (1 + 1e-9)


def test_fastv_judges_a_clip_as_a_whole() -> None:
    """A frame that draws little attention keeps little, whatever stands out in it."""
    views = [view(2, 2), view(2, 2, 1)]
    faint = GridView(2, 2, {Evidence.LAST_ROW: views[1][Evidence.LAST_ROW] * 1e-3})
    first, second = FastV().plans([views[0], faint], Amount("attention_mass", 0.9))
    assert len(first.places) >= 1 and len(second.places) == 0
    assert [len(p.places) for p in FastV().plans(views, Amount("attention_mass", 1.0))] == [4, 4]


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(0, 200),
)
def test_shares_are_kept_and_no_grid_gets_more_than_it_has(grids: list[tuple[float, int]], total: int) -> None:
    shares, sizes = [s for s, _n in grids], [n for _s, n in grids]
    kept = allocate(shares, sizes, total)
    assert sum(kept) == min(total, sum(sizes)) and all(k <= n for k, n in zip(kept, sizes, strict=True))
    for (a, i), (b, j) in itertools.permutations(zip(shares, range(len(shares)), strict=True), 2):
        if kept[i] < sizes[i]:  # then nobody has got one for less
            assert kept[j] == 0 or a / (kept[i] + 1) <= b / kept[j] + 1e-12


def test_hired_gives_frames_their_share_and_an_image_all() -> None:
    rich, poor = view(4, 4), view(4, 4, 1)
    double = {**rich.evidence, Evidence.FIRST_CLS_ROW: torch.full((16,), 3 / 64)}
    single = {**poor.evidence, Evidence.FIRST_CLS_ROW: torch.full((16,), 1 / 64)}
    plans = Hired().plans([replace(rich, evidence=double), replace(poor, evidence=single)], budget(8))
    assert [p.places.tolist() for p in plans] == [
        by_hand(one[Evidence.CLS_ROW], c) for one, c in ((rich, 6), (poor, 2))
    ]
    [alone] = Hired().plans([rich], budget(8))
    assert alone.places.tolist() == by_hand(rich[Evidence.CLS_ROW], 8)


def test_visionzip_keeps_the_dominant_and_sums_up_the_rest() -> None:
    one, tokens = view(8, 8), torch.randn(64, 5)
    [plan] = VisionZip().plans([one], budget(32))  # 27 and 5, as 54 and 10
    dominant = by_hand(one[Evidence.CLS_ROW], 27)
    rest = [i for i in range(64) if i not in dominant]
    targets = rest[::7][:5]
    assert plan.places.tolist() == sorted(dominant + targets)
    members: dict[int, list[int]] = {t: [] for t in targets}
    keys = one[Evidence.KEYS]
    for i in set(rest) - set(targets):
        like = [float(torch.cosine_similarity(keys[i], keys[t], dim=0)) for t in targets]
        members[targets[like.index(max(like))]].append(i)
    for place, token in zip(plan.places.tolist(), plan.apply(tokens), strict=True):
        others = tokens[members[place]].mean(0) if members.get(place) else 0
        assert torch.allclose(token, tokens[place] + others, atol=1e-6)


def test_tome_by_hand() -> None:
    """One round: the most similar pairs of an even and an odd token are averaged, where the odd one stood."""
    one, tokens = view(3, 4), torch.randn(12, 5)
    [plan] = ToMe().plans([one], budget(8))
    unit = torch.nn.functional.normalize(one[Evidence.KEYS], dim=-1)
    likeness = unit[::2] @ unit[1::2].T
    joining = by_hand(likeness.max(-1).values, 4)
    members = {i: [i] for i in range(12) if i % 2 or i // 2 not in joining}
    for i in joining:
        members[2 * int(likeness[i].argmax()) + 1].append(2 * i)
    assert plan.places.tolist() == sorted(members)
    for place, token in zip(plan.places.tolist(), plan.apply(tokens), strict=True):
        assert torch.allclose(token, tokens[members[place]].mean(0), atol=1e-6)


def test_tome_merges_what_is_alike_in_several_rounds() -> None:
    colours = torch.eye(3)[[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]]
    [plan] = ToMe().plans([GridView(4, 4, {Evidence.KEYS: colours})], budget(3))
    assert plan.weights is not None
    assert sorted(map(tuple, (plan.weights @ colours).tolist())) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_mustdrop_merges_even_windows_and_ranks_by_the_last_layer() -> None:
    features = torch.randn(36, 8, generator=torch.Generator().manual_seed(0))
    even = [r * 6 + c for r in range(3) for c in range(3, 6)]
    features[even] = torch.ones(8)
    scores = torch.linspace(0.001, 0.002, 36)
    scores[4] = 0.5  # of the even window's nine
    one = GridView(6, 6, {Evidence.LAST_CLS_ROW: scores, Evidence.FIRST_FEATURES: features})
    [plan] = MustDrop().plans([one], budget(36))
    assert plan.places.tolist() == sorted([*set(range(36)) - set(even), 10])
    tokens = torch.randn(36, 5)
    merged = plan.apply(tokens)[plan.places.tolist().index(10)]
    assert torch.allclose(merged, tokens[even].mean(0), atol=1e-6)
    [few] = MustDrop().plans([one], budget(3))
    assert few.places.tolist() == [10, 34, 35], "a merged token has its patches' mean"


def test_windows_less_even_than_four_fifths_stay() -> None:
    def kept(evenness: float) -> int:
        shared = torch.full((9, 1), evenness**0.5)
        features = torch.cat([shared, torch.eye(9) * (1 - evenness) ** 0.5], 1)  # any two have this cosine
        one = GridView(3, 3, {Evidence.LAST_CLS_ROW: torch.rand(9), Evidence.FIRST_FEATURES: features})
        return len(MustDrop().plans([one], budget(9))[0].places)

    assert (kept(0.79), kept(0.81)) == (9, 1)


def test_resize_keeps_no_weights_of_a_plan() -> None:
    """They are as many as a picture's patches times those that are left, and pictures have any shape."""
    [plan] = Resize().plans([view(9, 11)], ratio(0.5))
    weights = weakref.ref(plan.weights)
    del plan
    gc.collect()
    assert weights() is None


def test_resize_averages_equal_areas() -> None:
    [plan] = Resize().plans([view(6, 4)], budget(6))
    grid = torch.arange(24.0).view(1, 1, 6, 4)
    expected = torch.nn.functional.adaptive_avg_pool2d(grid, (3, 2)).flatten()
    assert torch.allclose(plan.apply(torch.arange(24.0)[:, None])[:, 0], expected)
    assert plan.places.tolist() == [5, 7, 13, 15, 21, 23]
    [plan] = Resize().plans([view(3, 3)], budget(4))  # areas cut patches
    corner = torch.tensor([4, 2, 0, 2, 1, 0, 0, 0, 0]) / 9
    assert plan.weights is not None and torch.allclose(plan.weights[0], corner)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 1))
def test_a_coarser_grid_wastes_little(rows: int, columns: int, share: float) -> None:
    count = max(1, int(rows * columns * share))
    r, c = coarser(rows, columns, count)
    assert 1 <= r <= rows and 1 <= c <= columns and r * c <= count
    assert c == columns or r * (c + 1) > count, "another column would be too many"


def test_random_is_drawn_from_the_seed_and_in_each_frame_anew() -> None:
    views = [view(6, 6), view(6, 6)]
    first, again, other = (Random(seed).plans(views, ratio(0.5)) for seed in (1, 1, 2**64 - 1))
    assert all(torch.equal(a.places, b.places) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].places, other[0].places)
    assert not torch.equal(first[0].places, first[1].places)


def test_of_equal_scores_the_first_stay() -> None:
    flat = GridView(2, 3, {Evidence.CLS_ROW: torch.ones(6)})
    assert ClsAttention().plans([flat], budget(4))[0].places.tolist() == [0, 1, 2, 3]


def test_a_plan_keeps_the_type_of_the_tokens() -> None:
    tokens = torch.randn(4, 3).bfloat16()
    weights = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0, 1.0]])
    merged = Plan(torch.tensor([0, 3]), weights).apply(tokens)
    assert merged.dtype == torch.bfloat16 and torch.equal(merged[1], tokens[3])


@pytest.mark.parametrize(
    ("vision", "field", "why"),
    [
        (Vision(pruner="best"), "vision.pruner", "there is no pruner 'best'; known are"),
        (Vision(pruner="random"), "vision", "set keep_ratio or token_budget"),
        (Vision(pruner="random", amount=Amount("attention_mass", 0.5)), "vision.attention_mass", "takes keep_ratio or"),
        (Vision(amount=ratio(0.5)), "vision.keep_ratio", "cannot be set without a pruner"),
    ],
)
def test_what_a_request_cannot_ask_for(vision: Vision, field: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as raised:
        pruner_of(replace(ask("r"), vision=vision))
    assert raised.value.violations[0].field == field


def test_to_keep_all_is_to_prune_nothing() -> None:
    for name, kind in PRUNERS.items():
        amount = Amount("keep_ratio", 1.0)
        assert pruner_of(replace(ask("r"), vision=Vision(pruner=name, amount=amount))) is None
        assert pruner_of(replace(ask("r"), vision=Vision(pruner=name, amount=replace(amount, value=0.5)))) is not None
        assert isinstance(kind().needs, frozenset)
    assert pruner_of(ask("r")) is None
    seeded = replace(ask("r", seed=7), vision=Vision(pruner="random", amount=ratio(0.5)))
    assert pruner_of(seeded) == Random(7)
