"""Token merging (ToMe, arXiv 2210.09461): similar patches are averaged pair by pair, after the tower instead of in it.

Each round is ``bipartite_soft_matching`` of facebookresearch/ToMe (``tome/merge.py``) without a class token, and at
most halves the number of tokens. ToMe runs one round in every layer, on that layer's keys; here rounds are repeated
after the tower until the amount is reached, and a merged token's key is the average of its patches' keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Plan, averaged, counts, grouped, together

_LEAST = 1e-12  # minimum norm of a key: a zero key is similar to none


@dataclass(frozen=True)
class ToMe:
    """Bipartite soft matching on the keys, mean over heads, of the layer that computes the features."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.KEYS})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        kept = counts([view.size for view in views], amount)
        plans: dict[int, Plan] = {}
        for which in grouped([(view.size, count) for view, count in zip(views, kept, strict=True)]):
            plans |= zip(which, _merged(together(views, which, Evidence.KEYS), kept[which[0]]), strict=True)
        return [plans[i] for i in range(len(views))]


def _merged(keys_TnK: Tensor, count: int) -> list[Plan]:
    """Merge until ``count`` tokens are left in each grid; a merged token takes the place of the odd token of its
    pair."""
    tiles, left, _width = keys_TnK.shape
    if not count:
        return [Plan(torch.empty(0, dtype=torch.int64)) for _ in range(tiles)]
    sums_TmK = keys_TnK  # same direction as the average
    places = np.tile(np.arange(left), (tiles, 1))
    groups = places.copy()
    while left > count:
        unit = sums_TmK / torch.linalg.vector_norm(sums_TmK, dim=-1, keepdim=True).clamp(min=_LEAST)
        similarity, partner = (x.cpu().numpy() for x in (unit[:, ::2] @ unit[:, 1::2].mT).max(-1))
        merging = min(left - count, left // 2)
        order = np.argsort(-similarity, axis=1, kind="stable")  # of the even tokens
        source, unmerged = order[:, :merging], order[:, merging:]
        # Remaining tokens in ToMe's order: even tokens without a partner by similarity, then the odd ones.
        joined = np.empty((tiles, left), np.int64)
        np.put_along_axis(joined, 2 * unmerged, np.arange(unmerged.shape[1])[None], 1)
        joined[:, 1::2] = np.arange(left // 2) + unmerged.shape[1]
        np.put_along_axis(joined, 2 * source, np.take_along_axis(partner, source, 1) + unmerged.shape[1], 1)
        places = np.concatenate([np.take_along_axis(places, 2 * unmerged, 1), places[:, 1::2]], axis=1)
        groups, left = np.take_along_axis(joined, groups, 1), left - merging
        if left > count:
            onto = torch.from_numpy(joined).to(sums_TmK.device)[..., None].expand_as(sums_TmK)
            empty = sums_TmK.new_zeros(tiles, left, sums_TmK.shape[2])
            sums_TmK = empty.scatter_add_(1, onto, sums_TmK)
    return averaged(groups, places)
