"""Token merging (ToMe, arXiv 2210.09461): patches with like keys are averaged, pair by pair, until few enough are left.

ToMe merges a few in every layer of the tower; here all is done behind it, in rounds that at most halve the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, averaged, counts


@dataclass(frozen=True)
class ToMe:
    """Bipartite soft matching on the keys of the layer that made the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.KEYS})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        kept = counts([look.size for look in looks], amount)
        return [_merged(look, count) for look, count in zip(looks, kept, strict=True)]


def _merged(look: Look, count: int) -> Plan:
    """In each round every second token may join the most similar of the others; the most similar pairs do.

    An average stands where the one stood that was joined, and its key is the average of its patches' keys.
    """
    keys = look[Evidence.KEYS]
    places = torch.arange(look.size, device=keys.device)
    groups = places.clone()
    if not count:
        return Plan(places[:0])
    while len(places) > count:
        sums = torch.zeros(len(places), keys.shape[-1], device=keys.device).index_add_(0, groups, keys)
        unit = F.normalize(sums, dim=-1)  # of a sum and of an average the direction is the same
        likeness, partner = (unit[::2] @ unit[1::2].T).max(-1)
        joining = likeness.argsort(descending=True, stable=True)[: min(len(places) - count, len(places) // 2)]
        target = torch.arange(len(places), device=keys.device)
        target[2 * joining] = 2 * partner[joining] + 1
        stays = torch.ones(len(places), dtype=torch.bool, device=keys.device)
        stays[2 * joining] = False
        places, groups = places[stays], (stays.cumsum(0) - 1)[target[groups]]
    return averaged(groups, places)
