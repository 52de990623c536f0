"""MustDrop (arXiv 2411.10803), its part before the decoder: even windows become one token, key patches are never lost.

A window is even where the features of its patches behind the tower's first layer have a mean cosine of ``EVEN``. The
paper merges there, in the tower; here the tower runs whole, and the merging is done behind it. Its later stages, in
the decoder, are not part of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, averaged, counts

WINDOW = 3  # patches a side
EVEN = 0.8  # mean cosine between the patches of a window
KEY_SHARE = 0.08  # of the patches, those that the class token attends to most


@dataclass(frozen=True)
class MustDrop:
    """Key patches first, then what the class token attends to most, an average by its patches' mean. Where merging
    leaves fewer than the amount, fewer they are."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.FIRST_FEATURES})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        kept = counts([look.size for look in looks], amount)
        return [_kept(look, count) for look, count in zip(looks, kept, strict=True)]


def _kept(look: Look, count: int) -> Plan:
    scores = look[Evidence.CLS_ROW]
    key = torch.zeros(look.size, dtype=torch.bool, device=scores.device)
    key[scores.argsort(descending=True, stable=True)[: math.ceil(KEY_SHARE * look.size)]] = True
    leader = _leaders(look, key)
    places = leader.unique()
    groups = torch.searchsorted(places, leader)
    sizes = torch.bincount(groups, minlength=len(places))
    means = torch.zeros(len(places), device=scores.device).index_add_(0, groups, scores) / sizes
    rank = means + 2.0 * key[places]  # attention is at most 1
    chosen = rank.argsort(descending=True, stable=True)[:count].sort().values
    renumbered = torch.full((len(places),), -1, device=scores.device)
    renumbered[chosen] = torch.arange(len(chosen), device=scores.device)
    return averaged(renumbered[groups], places[chosen])


def _leaders(look: Look, key: Tensor) -> Tensor:
    """Int64 ``[n]``: in whose place each patch's token stands; itself but for the patches of even windows that are not
    key patches. Patches beyond the last whole window stay alone."""
    grid = torch.arange(look.size, device=key.device).view(look.rows, look.columns)
    leader = grid.flatten().clone()
    if min(look.rows, look.columns) < WINDOW:
        return leader
    windows = grid.unfold(0, WINDOW, WINDOW).unfold(1, WINDOW, WINDOW).reshape(-1, WINDOW * WINDOW)
    features = F.normalize(look[Evidence.FIRST_FEATURES], dim=-1)[windows]
    pairs = WINDOW**4 - WINDOW**2
    evenness = ((features @ features.mT).sum((1, 2)) - WINDOW**2) / pairs
    for window in windows[evenness >= EVEN]:
        others = window[~key[window]]
        leader[others] = others[len(others) // 2]
    return leader
