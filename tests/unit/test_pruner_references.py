"""Pruners against independent transcriptions of their authors' code, on random inputs and on inputs full of ties.

The rules are written here from what the code does, with plain loops. ``torch.topk`` leaves the order of ties open; the
transcriptions take the first of equal scores, as the pruners do.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmserve.core.request import Amount
from mmserve.models.evidence import OF_CLASS, OF_PATCHES
from mmserve.models.projectors import mlp_projector
from mmserve.models.vision import LlavaVision
from mmserve.prune.base import Evidence, GridView, Part, Plan
from mmserve.prune.hired import Hired
from mmserve.prune.mustdrop import MustDrop
from mmserve.prune.tome import ToMe
from mmserve.prune.visionzip import VisionZip

SIDE, HEADS = 12, 4
PATCHES = SIDE**2
BUDGETS = (128, 64, 32, 16)
Groups = dict[int, list[int]]


class Tower:
    """A CLIP tower of random weights as eager attention shows it: what the authors' code reads."""

    def __init__(self, pictures: int) -> None:
        config = CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=HEADS,
            image_size=7 * SIDE, patch_size=7,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(20)
        tower = CLIPVisionModel(config).eval().requires_grad_(False)
        for name, weight in tower.named_parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=draw) * (2.0 / weight[0].numel() ** 0.5))
            elif "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.1)
        tower.set_attn_implementation("eager")
        keys: list[Tensor] = []
        hook = tower.encoder.layers[-2].self_attn.k_proj.register_forward_hook(lambda _m, _a, out: keys.append(out))
        self.pixels = torch.randn(pictures, 3, 7 * SIDE, 7 * SIDE, generator=draw)
        out = tower(self.pixels, output_attentions=True, output_hidden_states=True)
        hook.remove()
        self.hidden_BND = out.hidden_states[-2]
        self.attentions: list[Tensor] = list(out.attentions)  # [B, H, N, N] each
        self.keys_BHNK = keys[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)
        vision = LlavaVision(
            tower, mlp_projector("linear", 32, 32), None, select_layer=-2, has_cls=True, later=torch.nn.ModuleList()
        )
        seen = vision.encode([{"pixels": own[None]} for own in self.pixels], OF_CLASS | OF_PATCHES, clip=False)
        self.views = [picture.grids[0].view for picture in seen]


@pytest.fixture(scope="module")
def tower() -> Tower:
    return Tower(pictures=6)


def first_best(scores: Tensor, count: int) -> list[int]:
    """Indices of the highest scores, the best first; of equal ones the first."""
    return sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:count]


def groups_of(plan: Plan) -> Groups:
    if plan.weights is None:
        return {place: [place] for place in plan.places.tolist()}
    rows = zip(plan.places.tolist(), plan.weights, strict=True)
    return {place: row.nonzero().flatten().tolist() for place, row in rows}


def budget(count: int) -> Amount:
    return Amount("token_budget", count)


# --- VisionZip ---


def visionzip(
    attention_Hn: Tensor, keys_HnK: Tensor, hidden_nD: Tensor, dominant: int, contextual: int
) -> dict[int, Tensor]:
    """dvlab-research/VisionZip, ``visionzip/clip_encoder.py`` and ``utils.py`` (commit 3151f6d), but for the class
    token: the token at each dominant patch and at each target."""
    chosen = set(first_best(attention_Hn.sum(0), dominant))
    metric = keys_HnK.mean(0)
    rest = [i for i in range(len(metric)) if i not in chosen]
    step = max(1, len(rest) // contextual)
    targets = [rest[i] for i in range(0, len(rest), step)][:contextual]
    joined: dict[int, list[Tensor]] = {t: [] for t in targets}
    for i in rest:
        if i not in targets:
            cosines = torch.stack([torch.cosine_similarity(metric[i], metric[t], dim=0) for t in targets])
            joined[targets[int(cosines.argmax())]].append(hidden_nD[i])
    found = {i: hidden_nD[i] for i in chosen}
    for t, others in joined.items():
        found[t] = hidden_nD[t] + (torch.stack(others).mean(0) if others else 0)
    return found


def test_visionzip_makes_the_tokens_of_its_code(tower: Tower) -> None:
    equal = 0
    for i, view in enumerate(tower.views):
        rows = tower.attentions[-2][i, :, 0, 1:]
        for count, few in zip(BUDGETS, (20, 10, 5, 2), strict=True):
            hidden = tower.hidden_BND[i, 1:]
            wanted = visionzip(rows, tower.keys_BHNK[i, :, 1:], hidden, count - few, few)
            [plan] = VisionZip().plans([view], budget(count))
            assert plan.places.tolist() == sorted(wanted)
            made = plan.apply(hidden)
            equal += all(torch.allclose(made[k], wanted[p], atol=1e-5) for k, p in enumerate(plan.places.tolist()))
    assert equal == len(tower.views) * len(BUDGETS)


@pytest.mark.parametrize("seed", range(8))
def test_visionzip_with_ties_in_attention(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 4, (HEADS, 49), generator=draw).float() / 256
    keys, hidden = torch.randn(HEADS, 49, 8, generator=draw), torch.randn(49, 6, generator=draw)
    view = GridView(7, 7, {Evidence.CLS_ROW: rows.mean(0), Evidence.KEYS: keys.mean(0)})
    [plan] = VisionZip().plans([view], budget(26))
    wanted = visionzip(rows, keys, hidden, 22, 4)
    assert plan.places.tolist() == sorted(wanted)
    assert torch.allclose(plan.apply(hidden), torch.stack([wanted[p] for p in sorted(wanted)]), atol=1e-5)


# --- ToMe ---


def tome_round(metric_NK: Tensor, tokens: list[list[int]], remove: int) -> tuple[Tensor, list[list[int]]]:
    """facebookresearch/ToMe, ``bipartite_soft_matching`` and ``merge_wavg`` of ``tome/merge.py`` (commit af95e4b),
    without a class token: patches of each token in the order that the code leaves, and the average of their metric."""
    count = len(tokens)
    remove = min(remove, count // 2)
    unit = metric_NK / metric_NK.norm(dim=-1, keepdim=True)
    even, odd = list(range(0, count, 2)), list(range(1, count, 2))
    scores = unit[even] @ unit[odd].T
    best = scores.max(dim=-1)
    order = first_best(best.values, len(even))
    merged = [list(tokens[i]) for i in odd]
    for a in order[:remove]:
        merged[int(best.indices[a])] += tokens[even[a]]
    left = [tokens[even[a]] for a in order[remove:]] + merged
    sizes = torch.tensor([float(len(t)) for t in tokens])
    of = {patch: i for i, t in enumerate(tokens) for patch in t}
    means = []
    for members in left:
        parts = sorted({of[patch] for patch in members})
        means.append((metric_NK[parts] * sizes[parts, None]).sum(0) / sizes[parts].sum())
    return torch.stack(means), left


def tome(metric_nK: Tensor, count: int) -> list[list[int]]:
    tokens = [[i] for i in range(len(metric_nK))]
    while len(tokens) > count:
        metric_nK, tokens = tome_round(metric_nK, tokens, len(tokens) - count)
    return sorted(sorted(members) for members in tokens)


def test_tome_merges_the_groups_of_its_code(tower: Tower) -> None:
    equal = 0
    for i, view in enumerate(tower.views):
        metric = tower.keys_BHNK[i].mean(0)[1:]
        for count in BUDGETS:
            [plan] = ToMe().plans([view], budget(count))
            groups = groups_of(plan)
            assert plan.weights is not None and all(place in members for place, members in groups.items())
            assert torch.allclose(plan.weights.sum(1), torch.ones(count), atol=1e-6)
            equal += sorted(groups.values()) == tome(metric, count)
    assert equal == len(tower.views) * len(BUDGETS)


def test_tome_with_ties_joins_the_first_of_equal_partners() -> None:
    metric = torch.eye(3)[torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 0, 2, 1, 0])]
    for count in (11, 8, 6):
        [plan] = ToMe().plans([GridView(3, 4, {Evidence.KEYS: metric})], budget(count))
        assert sorted(groups_of(plan).values()) == tome(metric, count), count


# --- MustDrop ---


def even_windows(features_nD: Tensor, side: int) -> list[list[int]]:
    """liuting20/MustDrop, ``conditional_pooling`` of ``local_merge.py`` (commit 909afa5): the windows of 3 x 3 whose
    mean cosine between two different patches is at least 0.8."""
    found = []
    for row in range(0, side, 3):
        for column in range(0, side, 3):
            window = [(row + i) * side + column + j for i in range(3) for j in range(3)]
            cosines = torch.cosine_similarity(features_nD[window][:, None], features_nD[window][None], dim=-1)
            if float((cosines.sum() - cosines.trace()) / 72) >= 0.8:
                found.append(window)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_mustdrop_merges_windows_and_keeps_the_key_set_of_the_last_layer(tower: Tower, seed: int) -> None:
    """``clip_encoder.py``: the key set is the best ceil(8%) of the tokens by the last layer's class row."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(PATCHES, 16, generator=draw)
    smooth = features.view(4, 3, 4, 3, 16).mean((1, 3), keepdim=True).expand(-1, 3, -1, 3, -1).reshape(PATCHES, 16)
    features = torch.where(torch.rand(PATCHES, 1, generator=draw) < 0.93, smooth + 0.1 * features, features)
    row = tower.attentions[-1][seed, :, 0, 1:].mean(0)
    view = GridView(SIDE, SIDE, {**tower.views[seed].evidence, Evidence.FIRST_FEATURES: features})
    windows = even_windows(features, SIDE)
    assert 0 < len(windows) < 16
    merged = {patch for window in windows for patch in window}
    tokens = windows + [[i] for i in range(PATCHES) if i not in merged]
    [everything] = MustDrop().plans([view], budget(PATCHES))
    assert sorted(groups_of(everything).values()) == sorted(tokens)
    key_count = math.ceil(0.08 * len(tokens))
    best = first_best(torch.stack([row[t].double().mean() for t in tokens]), key_count)
    [key_set] = MustDrop().plans([view], budget(key_count))
    assert sorted(groups_of(key_set).values()) == sorted(tokens[i] for i in best)


# --- HiRED ---


def hired(
    first_n: Tensor, rows_Tn: Tensor, total: int, alpha: float, part_of: list[int], tiles: int
) -> list[list[int]]:
    """hasanar1f/HiRED, ``HiRED_token_selection`` of its LLaVA-NeXT (commit 502d6dd): what is kept of the whole view and
    of each tile. ``part_of``: the tile that each patch of the whole view counts for."""
    count = len(first_n)
    full = min(int(total * alpha), count)
    rest = min(total - full, tiles * count)
    kept = [sorted(first_best(rows_Tn[0], full))]
    counted = torch.zeros(tiles)
    for i in first_best(first_n, int(count * (1 - alpha))):
        counted[part_of[i]] += 1
    budgets = torch.clamp((counted / counted.sum() * rest).int(), max=count).tolist()
    return kept + [sorted(first_best(rows_Tn[1 + t], budgets[t])) for t in range(tiles)]


GRIDS = {"stacked": (3, 1), "square": (2, 2), "wide": (1, 2)}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_hired_keeps_the_patches_of_its_code(grid: str, ties: bool) -> None:
    down, across = GRIDS[grid]
    tiles, count = down * across, 36
    parts = [Part(r / down, (r + 1) / down, c / across, (c + 1) / across) for r in range(down) for c in range(across)]
    runs = [i * tiles // count for i in range(count)]  # of equal length, in the order of rows: the code's parts
    shown = [(i // 6) * down // 6 * across + (i % 6) * across // 6 for i in range(count)]
    assert (runs == shown) == (grid == "stacked"), "the code's parts are what tiles show only where these are stacked"
    draw = torch.Generator().manual_seed(tiles)
    for _ in range(12):
        rows = torch.rand(2, 1 + tiles, count, generator=draw)
        rows = ((rows * 5).floor() if ties else rows) / 64
        first, last = rows
        views = [
            GridView(6, 6, {Evidence.FIRST_CLS_ROW: first[i], Evidence.CLS_ROW: last[i]}, part)
            for i, part in enumerate([None, *parts])
        ]
        for rate in (0.1, 0.2, 0.37, 0.5, 0.9):
            total = int((1 + tiles) * count * rate)
            plans = Hired().plans(views, Amount("keep_ratio", rate))
            assert [plan.places.tolist() for plan in plans] == hired(first[0], last, total, 0.5, shown, tiles)
            [alone] = Hired().plans(views[:1], Amount("keep_ratio", rate))  # LLaVA-1.5's: one view
            assert alone.places.tolist() == sorted(first_best(last[0], int(count * rate)))


def test_evidence_of_the_tower_is_the_authors(tower: Tower) -> None:
    for i, view in enumerate(tower.views):
        for kind, layer in ((Evidence.CLS_ROW, -2), (Evidence.FIRST_CLS_ROW, 0), (Evidence.LAST_CLS_ROW, -1)):
            assert torch.allclose(view[kind], tower.attentions[layer][i, :, 0, 1:].mean(0), atol=1e-6)
        assert torch.allclose(view[Evidence.KEYS], tower.keys_BHNK[i].mean(0)[1:], atol=1e-5)
    rows = [view[Evidence.LAST_CLS_ROW] for view in tower.views]
    assert not any(torch.allclose(a, b) for a, b in pairwise(rows)), "pictures differ"
