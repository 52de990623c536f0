"""VisionZip (arXiv 2412.04467): the patches that the class token attends to most, and a few averages of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, Look, Plan, averaged, best, counts

#: Of the tokens kept, those that are averages: 10 of 64 in the paper.
CONTEXTUAL = 10 / 64


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
    dominant = best(look[Evidence.CLS_ROW], count - contextual).places
    if not contextual:
        return Plan(dominant)
    groups = torch.full((look.size,), -1, device=dominant.device)
    groups[dominant] = torch.arange(len(dominant), device=dominant.device)
    rest = (groups < 0).nonzero().flatten()
    targets = rest[:: len(rest) // contextual][:contextual]
    keys = F.normalize(look[Evidence.KEYS], dim=-1)
    nearest = (keys[rest] @ keys[targets].T).argmax(-1)
    groups[rest] = len(dominant) + nearest
    groups[targets] = len(dominant) + torch.arange(contextual, device=dominant.device)
    return averaged(groups, torch.cat([dominant, targets]))
