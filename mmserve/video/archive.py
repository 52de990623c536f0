"""Visual tokens of old frames, kept in host memory for questions about the past: 17 MB an hour for the bundled models.

They are stored in bfloat16, which halves the memory; the rounding error is smaller than the effect of pruning and
pooling.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmserve.core.stream_state import ArchiveState
from mmserve.video.base import Scope
from mmserve.video.layout import FrameRows
from mmserve.video.rows import Unit

#: Bytes of a frame besides its tokens: Python and torch objects.
OVERHEAD = 1024


@dataclass(frozen=True)
class ArchivedFrame:
    """An archived frame that can be prefilled again: its rows, and its visual tokens ``[k, D]``."""

    unit: Unit
    tokens_kD: Tensor
    number: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.tokens_kD.nbytes + self.unit.ids.nbytes + self.unit.coordinates.nbytes + OVERHEAD


class Archive:
    """The newest frames whose tokens fit in ``most`` bytes; not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._frames = most, deque[ArchivedFrame]()
        self.bytes = 0

    @property
    def seconds(self) -> np.ndarray:
        """Times of its frames, float64, ascending."""
        return np.array([one.unit.seconds for one in self._frames])

    def add(self, rows: FrameRows) -> None:
        """Add a frame, newer than all others, or an extended version of the newest unit; evicts the oldest frames if
        necessary."""
        if self._frames and rows.number == self._frames[-1].number >= 0:
            self.bytes -= self._frames.pop().bytes
        self._keep(ArchivedFrame(rows.unit, rows.tokens_kD.to("cpu", torch.bfloat16, copy=True), rows.number))

    def saved(self) -> ArchiveState | None:
        """The state for ``restore``; None if it is empty."""
        frames = list(self._frames)
        if not frames:
            return None
        units = [one.unit for one in frames]
        return ArchiveState(
            np.array([one.number for one in frames]),
            np.array([(unit.begin, unit.seconds) for unit in units]),
            np.array([unit.frames for unit in units]),
            np.array([(len(unit.ids), len(one.tokens_kD)) for unit, one in zip(units, frames, strict=True)]),
            np.concatenate([unit.ids for unit in units]),
            np.concatenate([unit.coordinates for unit in units], axis=1),
            torch.cat([one.tokens_kD for one in frames]),
        )

    def restore(self, saved: ArchiveState) -> None:
        """Restore a saved state."""
        rows, tokens = np.cumsum(saved.counts, axis=0)[:-1].T
        ids, places = np.split(saved.ids, rows), np.split(saved.coordinates, rows, axis=1)
        visual = saved.tokens.tensor_split(tokens.tolist())
        for i, number in enumerate(saved.numbers.tolist()):
            begin, seconds = saved.seconds[i].tolist()
            unit = Unit(ids[i].copy(), places[i].copy(), begin, seconds, int(saved.frames[i]))
            self._keep(ArchivedFrame(unit, visual[i].clone(), number))

    def _keep(self, old: ArchivedFrame) -> None:
        self._frames.append(old)
        self.bytes += old.bytes
        while self.bytes > self._most:
            self.bytes -= self._frames.popleft().bytes

    def found(self, scope: Scope) -> list[ArchivedFrame]:
        """Its frames within ``scope``, oldest first."""
        chosen = np.flatnonzero(inside(self.seconds, scope))
        return [self._frames[i] for i in chosen.tolist()] if len(chosen) else []


def inside(seconds: np.ndarray, scope: Scope) -> np.ndarray:
    """Bool ``[n]``: which of ``seconds`` (float64; nan is excluded) are within ``scope``, including its ends."""
    begin = -math.inf if scope.begin is None else scope.begin
    end = math.inf if scope.end is None else scope.end
    return (seconds >= begin) & (seconds <= end)


def evenly(frames: list[ArchivedFrame], most: int) -> list[ArchivedFrame]:
    """At most ``most`` of ``frames``, evenly spaced and including the last one; at least one."""
    if len(frames) <= max(1, most):
        return frames
    chosen = np.linspace(len(frames) - 1, 0, max(1, most)).round().astype(int)
    return [frames[i] for i in sorted(set(chosen.tolist()))]
