"""Another baseline: a coarser grid. Small details of a picture, such as text, are lost first.

The grid of tokens is averaged over equal areas instead of resizing the picture: the supported towers have a fixed input
size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from mmserve.core.request import Amount
from mmserve.prune.base import COUNTED, Evidence, GridView, Plan, counts


@dataclass(frozen=True)
class Resize:
    """Each area's average replaces the patch at its middle."""

    needs: ClassVar[frozenset[Evidence]] = frozenset()
    amounts: ClassVar[frozenset[str]] = COUNTED

    def plans(self, views: Sequence[GridView], amount: Amount) -> list[Plan]:
        sizes = [view.size for view in views]
        kept = zip(views, counts(sizes, amount), strict=True)
        return [_resized(view.rows, view.columns, count) for view, count in kept]


def _resized(full_rows: int, full_columns: int, count: int) -> Plan:
    if not count:
        return Plan(torch.empty(0, dtype=torch.int64))
    rows, columns = coarser(full_rows, full_columns, count)
    places = _middles(full_rows, rows)[:, None] * full_columns + _middles(full_columns, columns)
    return Plan(places.flatten(), torch.kron(_areas(full_rows, rows), _areas(full_columns, columns)))


def coarser(rows: int, columns: int, count: int) -> tuple[int, int]:
    """Rows and columns of about the same aspect ratio with at most ``count`` cells."""
    fewer = max(1, math.floor(rows * math.sqrt(count / (rows * columns))))
    across = max(1, min(columns, count // fewer))
    return min(fewer, count // across), across


@lru_cache(maxsize=256)
def _areas(size: int, cells: int) -> Tensor:
    """Fp32 ``[cells, size]``: the fraction of each of ``size`` equal pieces in each of ``cells`` equal cells."""
    edges = torch.arange(cells + 1, dtype=torch.float64) * size / cells
    pieces = torch.arange(size, dtype=torch.float64)
    overlap = torch.minimum(edges[1:, None], pieces + 1) - torch.maximum(edges[:-1, None], pieces)
    return (overlap.clamp(min=0) * cells / size).float()


def _middles(size: int, cells: int) -> Tensor:
    """Int64 ``[cells]``: the piece at the middle of each cell."""
    return (2 * torch.arange(cells) + 1) * size // (2 * cells)
