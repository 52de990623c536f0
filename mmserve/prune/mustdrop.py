"""MustDrop (arXiv 2411.10803), its part before the decoder: even windows become one token, key patches are never lost.

A window is even where the features of its patches behind the tower's first layer have a mean cosine of ``EVEN``. The
paper merges there, in the tower; here the tower runs whole, and the merging is done behind it. Its later stages, in
the decoder, are not part of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import (
    COUNTED,
    Evidence,
    Look,
    Plan,
    averaged,
    counts,
    grouped,
    highest_of_each,
    together,
)

WINDOW = 3  # patches a side
EVEN = 0.8  # mean cosine between the patches of a window
KEY_SHARE = 0.08  # of the patches, those that the class token attends to most
_LEAST = 1e-12  # of a feature's length: what has none is like nothing


@dataclass(frozen=True)
class MustDrop:
    """Key patches first, then what the class token attends to most, an average by its patches' mean. Where merging
    leaves fewer than the amount, fewer they are."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.FIRST_FEATURES})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        kept = counts([look.size for look in looks], amount)
        plans: dict[int, Plan] = {}
        for which in grouped([(look.rows, look.columns) for look in looks]):
            scores_Tn = together(looks, which, Evidence.CLS_ROW).cpu().numpy()
            leader_Tn, key_Tn = _leaders(scores_Tn, together(looks, which, Evidence.FIRST_FEATURES), looks[which[0]])
            found = _kept(scores_Tn, leader_Tn, key_Tn, np.array([kept[i] for i in which]))
            plans |= {which[tile]: plan for tile, plan in found.items()}
        return [plans[i] for i in range(len(looks))]


def _kept(scores_Tn: np.ndarray, leader_Tn: np.ndarray, key_Tn: np.ndarray, counts_T: np.ndarray) -> dict[int, Plan]:
    """The plan of each of the grids, which stand side by side here."""
    tiles, size = scores_Tn.shape
    leader = (leader_Tn + np.arange(tiles)[:, None] * size).ravel()
    led = np.bincount(leader, minlength=tiles * size)
    places = np.flatnonzero(led)
    group = (np.cumsum(led > 0) - 1)[leader]
    means = np.bincount(group, scores_Tn.ravel()) / led[places]
    tile = places // size
    order = np.lexsort((-(means + 2.0 * key_Tn.ravel()[places]), tile))  # attention is at most 1
    rank = np.arange(len(order)) - np.searchsorted(tile, np.arange(tiles))[tile]
    chosen = np.zeros(len(places), dtype=bool)
    chosen[order[rank < counts_T[tile]]] = True
    left_T = np.bincount(tile[chosen], minlength=tiles)
    first_T = left_T.cumsum() - left_T
    number = np.where(chosen, chosen.cumsum() - 1 - first_T[tile], -1)
    groups_Tn, stand = number[group].reshape(tiles, size), places[chosen] % size
    plans: dict[int, Plan] = {}
    for alike in grouped(left_T.tolist()):
        at = first_T[alike][:, None] + np.arange(left_T[alike[0]])
        plans |= zip(alike, averaged(groups_Tn[alike], stand[at]), strict=True)
    return plans


def _leaders(scores_Tn: np.ndarray, features_TnC: Tensor, like: Look) -> tuple[np.ndarray, np.ndarray]:
    """Int64 ``[T, n]``: in whose place each patch's token stands; itself but for the patches of even windows that are
    not key patches. Patches beyond the last whole window stay alone. And bool ``[T, n]``: the key patches.

    ``like``: one of the grids.
    """
    tiles, size = scores_Tn.shape
    starts = np.arange(tiles)[:, None] * size  # of each grid, side by side
    key = np.zeros(tiles * size, dtype=bool)
    key[highest_of_each(scores_Tn, math.ceil(KEY_SHARE * size)) + starts] = True
    leader = np.arange(tiles * size)
    windows, members = _windows(like.rows, like.columns)
    if len(windows):
        windows = (windows + starts[:, None])[_evenness(features_TnC, members) >= EVEN]
        others = ~key[windows]
        held = others.sum(1)
        middle = windows[others & (np.cumsum(others, axis=1) - 1 == held[:, None] // 2)]  # one where there are any
        leader[windows[others]] = np.repeat(middle, held[held > 0])
    return leader.reshape(tiles, size) - starts, key.reshape(tiles, size)


@lru_cache(maxsize=64)
def _windows(rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """The patches of each window (int64 ``[w, 9]``), and which each is made of (fp32 ``[w, n]``, 0 or 1)."""
    down, across = rows // WINDOW, columns // WINDOW
    grid = np.arange(rows * columns).reshape(rows, columns)[: down * WINDOW, : across * WINDOW]
    windows = grid.reshape(down, WINDOW, across, WINDOW).swapaxes(1, 2).reshape(-1, WINDOW**2)
    members = torch.zeros(len(windows), rows * columns).scatter_(1, torch.from_numpy(windows), 1.0)
    return windows, members


def _evenness(features_TnC: Tensor, members_wn: Tensor) -> np.ndarray:
    """Mean cosine between the patches of each window, ``[T, w]``: those of all pairs together are the square of their
    sum."""
    lengths_Tn = torch.linalg.vector_norm(features_TnC, dim=-1).clamp(min=_LEAST)
    summed_TwC = (members_wn.to(lengths_Tn.device) / lengths_Tn[:, None]) @ features_TnC
    squares: np.ndarray = torch.linalg.vector_norm(summed_TwC, dim=-1).cpu().numpy() ** 2
    return (squares - WINDOW**2) / (WINDOW**4 - WINDOW**2)
