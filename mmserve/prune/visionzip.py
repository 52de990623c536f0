"""VisionZip (arXiv 2412.04467): the patches with the most class attention, and the others merged into a few tokens.

As in dvlab-research/VisionZip (``visionzip/clip_encoder.py``), with two differences: tokens are merged after the
projector instead of before it, and the class token is not kept, because LLaVA's projector is not trained on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Plan, averaged, counts, grouped, highest_of_each, together

#: Share of contextual tokens among those kept: 10 of 64 in the paper.
CONTEXTUAL = 10 / 64
_LEAST = 1e-12  # minimum norm of a key: a zero key is similar to none


@dataclass(frozen=True)
class VisionZip:
    """Targets are evenly spaced among the non-dominant patches; every other patch is merged into the target with the
    most similar key, mean over heads. A contextual token is its target plus the mean of the patches merged into it."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.KEYS})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        kept = counts([view.size for view in views], amount)
        plans: dict[int, Plan] = {}
        for which in grouped([(view.size, count) for view, count in zip(views, kept, strict=True)]):
            scores_Tn = together(views, which, Evidence.CLS_ROW).cpu().numpy()
            keys_TnK = together(views, which, Evidence.KEYS)
            plans |= zip(which, _zipped(scores_Tn, keys_TnK, kept[which[0]]), strict=True)
        return [plans[i] for i in range(len(views))]


def _zipped(scores_Tn: np.ndarray, keys_TnK: Tensor, count: int) -> list[Plan]:
    tiles, size = scores_Tn.shape
    contextual = round(count * CONTEXTUAL) if count < size else 0
    dominant = highest_of_each(scores_Tn, count - contextual)
    if not contextual:
        return [Plan(places) for places in torch.from_numpy(dominant)]
    tile, first = np.arange(tiles)[:, None], dominant.shape[1]
    groups = np.full((tiles, size), -1)
    groups[tile, dominant] = np.arange(first)
    rest = np.nonzero(groups < 0)[1].reshape(tiles, -1)
    targets = rest[:, :: rest.shape[1] // contextual][:, :contextual]
    groups[tile, rest] = first + _nearest(keys_TnK, targets)[tile, rest]
    groups[tile, targets] = -1
    plans = averaged(groups, np.concatenate([dominant, targets], axis=1))
    for plan in plans:
        assert plan.weights is not None
        plan.weights[torch.arange(count), plan.places] = 1.0  # the targets, in addition to the mean of the others
    return plans


def _nearest(keys_TnK: Tensor, targets_Tc: np.ndarray) -> np.ndarray:
    """Int64 ``[T, n]``: the index of the grid's target with the most similar key, by cosine."""
    at = torch.from_numpy(targets_Tc).to(keys_TnK.device)
    centres = keys_TnK.gather(1, at[..., None].expand(-1, -1, keys_TnK.shape[-1]))
    unit = centres / torch.linalg.vector_norm(centres, dim=-1, keepdim=True).clamp(min=_LEAST)
    found: np.ndarray = (keys_TnK @ unit.mT).argmax(-1).cpu().numpy()
    return found
