"""VisionZip (arXiv 2412.04467): the patches that the class token attends to most, and a few averages of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, averaged, counts, highest, on_cpu

#: Of the tokens kept, those that are averages: 10 of 64 in the paper.
CONTEXTUAL = 10 / 64
_LEAST = 1e-12  # of a key's length: what has none is like nothing


@dataclass(frozen=True)
class VisionZip:
    """Targets lie evenly spread among the patches that are not dominant; each other joins the target whose key is most
    like its own. The class token itself is not kept: LLaVA's projector never saw one."""

    needs: ClassVar[frozenset[Evidence]] = frozenset({Evidence.CLS_ROW, Evidence.KEYS})
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, looks: Sequence[Look], amount: Amount) -> list[Plan]:
        kept = counts([look.size for look in looks], amount)
        return [_zipped(look, count) for look, count in zip(looks, kept, strict=True)]


def _zipped(look: Look, count: int) -> Plan:
    contextual = round(count * CONTEXTUAL) if count < look.size else 0
    [scores] = on_cpu([look[Evidence.CLS_ROW]])
    dominant = highest(scores, count - contextual)
    if not contextual:
        return Plan(torch.from_numpy(dominant))
    groups = np.full(look.size, -1)
    groups[dominant] = np.arange(len(dominant))
    rest = np.flatnonzero(groups < 0)
    targets = rest[:: len(rest) // contextual][:contextual]
    groups[rest] = len(dominant) + _nearest(look[Evidence.KEYS], rest, targets)
    groups[targets] = len(dominant) + np.arange(contextual)
    return averaged(groups, np.concatenate([dominant, targets]))


def _nearest(keys_nC: Tensor, rest: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Which of ``targets`` has the key most like that of each of ``rest``; how long the latter's is has no say."""
    centres = keys_nC.index_select(0, torch.from_numpy(targets).to(keys_nC.device))
    likeness = keys_nC @ (centres / torch.linalg.vector_norm(centres, dim=-1, keepdim=True).clamp(min=_LEAST)).T
    found: np.ndarray = likeness.argmax(-1).cpu().numpy()[rest]
    return found
