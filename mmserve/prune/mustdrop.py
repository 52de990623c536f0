"""MustDrop (arXiv 2411.10803), its vision tower stage: uniform windows are merged, and tokens ranked by the last layer.

As in liuting20/MustDrop (``llava/model/multimodal_encoder``), a window whose features after the first layer have a mean
cosine of at least ``EVEN`` is averaged, and the key set is what the class token attends to most in the tower's last
layer. There, the layers after the first run on the merged tokens; here the tower runs on all patches, tokens are merged
after it, and a merged token has the mean attention of its patches. The code never drops its key set, 8% of the tokens;
here the request sets the number of kept tokens, and the key set comes first. The decoder stage is not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Plan, averaged, counts, grouped, together

WINDOW = 3  # patches a side
EVEN = 0.8  # minimum mean cosine between the patches of a merged window
_LEAST = 1e-12  # minimum norm of a feature: a zero feature is similar to none


@dataclass(frozen=True)
class MustDrop:
    """Scores: the class token's attention in the tower's last layer, after uniform windows are merged; fewer tokens
    than the amount are kept if merging leaves fewer."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.LAST_CLS_ROW, Evidence.FIRST_FEATURES})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        kept = counts([view.size for view in views], amount)
        plans: dict[int, Plan] = {}
        for which in grouped([(view.rows, view.columns) for view in views]):
            scores_Tn = together(views, which, Evidence.LAST_CLS_ROW).cpu().numpy()
            leader_Tn = _leaders(together(views, which, Evidence.FIRST_FEATURES), views[which[0]])
            found = _kept(scores_Tn, leader_Tn, np.array([kept[i] for i in which]))
            plans |= {which[tile]: plan for tile, plan in found.items()}
        return [plans[i] for i in range(len(views))]


def _kept(scores_Tn: np.ndarray, leader_Tn: np.ndarray, counts_T: np.ndarray) -> dict[int, Plan]:
    """The plans by grid index."""
    tiles, size = scores_Tn.shape
    leader = (leader_Tn + np.arange(tiles)[:, None] * size).ravel()
    led = np.bincount(leader, minlength=tiles * size)
    places = np.flatnonzero(led)
    group = (np.cumsum(led > 0) - 1)[leader]
    means = np.bincount(group, scores_Tn.ravel()) / led[places]
    tile = places // size
    order = np.lexsort((-means, tile))
    rank = np.arange(len(order)) - np.searchsorted(tile, np.arange(tiles))[tile]
    chosen = np.zeros(len(places), dtype=bool)
    chosen[order[rank < counts_T[tile]]] = True
    left_T = np.bincount(tile[chosen], minlength=tiles)
    first_T = left_T.cumsum() - left_T
    number = np.where(chosen, chosen.cumsum() - 1 - first_T[tile], -1)
    groups_Tn, targets = number[group].reshape(tiles, size), places[chosen] % size
    plans: dict[int, Plan] = {}
    for alike in grouped(left_T.tolist()):
        at = first_T[alike][:, None] + np.arange(left_T[alike[0]])
        plans |= zip(alike, averaged(groups_Tn[alike], targets[at]), strict=True)
    return plans


def _leaders(features_TnC: Tensor, like: GridView) -> np.ndarray:
    """Int64 ``[T, n]``: for each patch the patch that its token replaces: itself, or the middle of its uniform window.

    Patches beyond the last complete window are not merged. ``like``: one of the grids.
    """
    tiles, size, _width = features_TnC.shape
    leader_Tn = np.tile(np.arange(size), (tiles, 1))
    windows, members = _windows(like.rows, like.columns)
    if len(windows):
        tile, even = np.nonzero(_evenness(features_TnC, members) >= EVEN)
        leader_Tn[tile[:, None], windows[even]] = windows[even, WINDOW**2 // 2][:, None]
    return leader_Tn


@lru_cache(maxsize=64)
def _windows(rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """The patches of each window (int64 ``[w, 9]``), and their membership matrix (fp32 ``[w, n]``, 0 or 1)."""
    down, across = rows // WINDOW, columns // WINDOW
    grid = np.arange(rows * columns).reshape(rows, columns)[: down * WINDOW, : across * WINDOW]
    windows = grid.reshape(down, WINDOW, across, WINDOW).swapaxes(1, 2).reshape(-1, WINDOW**2)
    members = torch.zeros(len(windows), rows * columns).scatter_(1, torch.from_numpy(windows), 1.0)
    return windows, members


def _evenness(features_TnC: Tensor, members_wn: Tensor) -> np.ndarray:
    """Mean cosine between the patches of each window, ``[T, w]``; the sum over all pairs is the squared norm of the
    sum."""
    lengths_Tn = torch.linalg.vector_norm(features_TnC, dim=-1).clamp(min=_LEAST)
    summed_TwC = (members_wn.to(lengths_Tn.device) / lengths_Tn[:, None]) @ features_TnC
    squares: np.ndarray = torch.linalg.vector_norm(summed_TwC, dim=-1).cpu().numpy() ** 2
    return (squares - WINDOW**2) / (WINDOW**4 - WINDOW**2)
