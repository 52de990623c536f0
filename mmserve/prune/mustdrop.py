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
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, averaged, counts, highest, on_cpu

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
        return [_kept(look, count) for look, count in zip(looks, kept, strict=True)]


def _kept(look: Look, count: int) -> Plan:
    [scores] = on_cpu([look[Evidence.CLS_ROW]])
    key = np.zeros(look.size, dtype=bool)
    key[highest(scores, math.ceil(KEY_SHARE * look.size))] = True
    leader = _leaders(look, key)
    led = np.bincount(leader, minlength=look.size)
    places = np.flatnonzero(led)
    groups = (np.cumsum(led > 0) - 1)[leader]
    means = np.bincount(groups, scores) / led[places]
    chosen = highest(means + 2.0 * key[places], count)  # attention is at most 1
    renumbered = np.full(len(places), -1)
    renumbered[chosen] = np.arange(len(chosen))
    return averaged(renumbered[groups], places[chosen])


def _leaders(look: Look, key: np.ndarray) -> np.ndarray:
    """Int64 ``[n]``: in whose place each patch's token stands; itself but for the patches of even windows that are not
    key patches. Patches beyond the last whole window stay alone."""
    leader = np.arange(look.size)
    windows, members = _windows(look.rows, look.columns)
    if not len(windows):
        return leader
    windows = windows[_evenness(look[Evidence.FIRST_FEATURES], members) >= EVEN]
    others = ~key[windows]
    held = others.sum(1)
    middle = windows[others & (np.cumsum(others, axis=1) - 1 == held[:, None] // 2)]  # one where there are any
    leader[windows[others]] = np.repeat(middle, held[held > 0])
    return leader


@lru_cache(maxsize=64)
def _windows(rows: int, columns: int) -> tuple[np.ndarray, Tensor]:
    """The patches of each window (int64 ``[w, 9]``), and which each is made of (fp32 ``[w, n]``, 0 or 1)."""
    down, across = rows // WINDOW, columns // WINDOW
    grid = np.arange(rows * columns).reshape(rows, columns)[: down * WINDOW, : across * WINDOW]
    windows = grid.reshape(down, WINDOW, across, WINDOW).swapaxes(1, 2).reshape(-1, WINDOW**2)
    members = torch.zeros(len(windows), rows * columns).scatter_(1, torch.from_numpy(windows), 1.0)
    return windows, members


def _evenness(features_nC: Tensor, members_wn: Tensor) -> np.ndarray:
    """Mean cosine between the patches of each window: those of all pairs together are the square of their sum."""
    lengths = torch.linalg.vector_norm(features_nC, dim=-1).clamp(min=_LEAST)
    summed_wC = (members_wn.to(lengths.device) / lengths) @ features_nC
    squares: np.ndarray = torch.linalg.vector_norm(summed_wC, dim=-1).cpu().numpy() ** 2
    return (squares - WINDOW**2) / (WINDOW**4 - WINDOW**2)
