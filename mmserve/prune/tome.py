"""Token merging (ToMe, arXiv 2210.09461): patches with like keys are averaged, pair by pair, until few enough are left.

ToMe merges a few in every layer of the tower; here all is done behind it, in rounds that at most halve the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, averaged, counts, grouped, together

_LEAST = 1e-12  # of a key's length: what has none is like nothing


@dataclass(frozen=True)
class ToMe:
    """Bipartite soft matching on the keys of the layer that made the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.KEYS})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        kept = counts([look.size for look in looks], amount)
        plans: dict[int, Plan] = {}
        for which in grouped([(look.size, count) for look, count in zip(looks, kept, strict=True)]):
            plans |= zip(which, _merged(together(looks, which, Evidence.KEYS), kept[which[0]]), strict=True)
        return [plans[i] for i in range(len(looks))]


def _merged(keys_TnC: Tensor, count: int) -> list[Plan]:
    """In each round every second token of a grid may join the most similar of the others; the most similar pairs do.

    An average stands where the one stood that was joined, and its key is the average of its patches' keys.
    """
    tiles, size, width = keys_TnC.shape
    sums_TmC = keys_TnC  # of a sum and of an average the direction is the same
    tile = np.arange(tiles)[:, None]
    places, groups, left = np.tile(np.arange(size), tiles), np.arange(tiles * size), size
    while left > count > 0:
        unit = sums_TmC / torch.linalg.vector_norm(sums_TmC, dim=-1, keepdim=True).clamp(min=_LEAST)
        likeness, partner = (x.cpu().numpy() for x in (unit[:, ::2] @ unit[:, 1::2].mT).max(-1))
        joining = np.argsort(-likeness, axis=1, kind="stable")[:, : min(left - count, left // 2)] + tile * (
            -(-left // 2)
        )
        even = 2 * joining - tile * (left % 2)
        target = np.arange(tiles * left)
        target[even] = 2 * partner.ravel()[joining] + 1 + tile * left
        stays = np.ones(tiles * left, dtype=bool)
        stays[even] = False
        joined = (np.cumsum(stays) - 1)[target]
        places, groups, left = places[stays], joined[groups], left - joining.shape[1]
        if left > count:
            onto = torch.from_numpy(joined).to(sums_TmC.device)
            empty = sums_TmC.new_zeros(tiles * left, width)
            sums_TmC = empty.index_add_(0, onto, sums_TmC.flatten(0, 1)).unflatten(0, (tiles, left))
    if not count:
        return [Plan(torch.empty(0, dtype=torch.int64)) for _ in range(tiles)]
    return averaged(groups.reshape(tiles, size) - tile * left, places.reshape(tiles, left))
