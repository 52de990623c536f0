"""Recompute policies: which positions each step runs through the model; all others are read from the K/V store."""

from __future__ import annotations

from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from mmserve.core.canvas import Canvas


class Recompute(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        """Positions (int64, ascending) to run in the next forward pass, a masked one of the block at least.

        Only positions that are run can be committed afterwards, so those the schedule is due to commit are among them.
        """
        ...


@runtime_checkable
class Watching(Protocol):
    """A recompute policy that looks at how much positions have changed before it selects those to run."""

    def watched(self, canvas: Canvas) -> np.ndarray:
        """Positions (int64, ascending) whose change it asks for before the next pass; empty if for none."""
        ...

    def rows(self, canvas: Canvas, changes: np.ndarray | None = None) -> np.ndarray:
        """As ``Recompute.rows``; ``changes`` (float32) is for each watched position how far its value vector at the
        second layer would move (1 - cosine) from the one in the store; None where none were asked for."""
        ...


@cache
def _watches(kind: type) -> bool:
    return issubclass(kind, Watching)


def is_watching(policy: Recompute) -> TypeGuard[Watching]:
    """As ``isinstance``, which looks through a protocol's members at each call; this is asked at every step."""
    return _watches(type(policy))


def changed_blocks(canvas: Canvas) -> np.ndarray:
    """Where attention is block-causal, from the first block in which a token became known at the latest step to the end
    of what the current block sees: after a pass over them all K/V so far are those of the tokens that are there."""
    changed = np.flatnonzero(canvas.committed_at == canvas.step)
    if canvas.step == 0:
        return np.arange(canvas.run_end)
    first = int(changed[0]) if len(changed) else canvas.block_start
    return np.arange(max(0, canvas.sight_of(first)), canvas.run_end)


def every_position(canvas: Canvas) -> np.ndarray:
    """All positions of the canvas."""
    return np.arange(canvas.size)
