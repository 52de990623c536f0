"""Recompute policies: which positions each step runs through the model; all others are read from the K/V store."""

from __future__ import annotations

from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from mmserve.core.canvas import Canvas


class Recompute(Protocol):
    """One policy with its numbers; it holds no state of a request."""

    def rows(self, canvas: Canvas) -> np.ndarray:
        """Positions (int64, ascending) to run in the next forward pass, at least one masked one of the block.

        Only positions that run can be committed afterwards, so those that the schedule commits next are included.
        """
        ...


@runtime_checkable
class Watching(Protocol):
    """A recompute policy that selects positions by how much their value vectors have changed."""

    def watched(self, canvas: Canvas) -> np.ndarray:
        """Positions (int64, ascending) whose change must be measured before the next pass; may be empty."""
        ...

    def rows(self, canvas: Canvas, changes: np.ndarray | None = None) -> np.ndarray:
        """As ``Recompute.rows``; ``changes`` (float32): the change of each watched position's value vector at the
        second layer from the stored one (1 - cosine); None if none is watched."""
        ...


@cache
def _watches(kind: type) -> bool:
    return issubclass(kind, Watching)


def is_watching(policy: Recompute) -> TypeGuard[Watching]:
    """Cached replacement of ``isinstance``, which checks all protocol members at each call; called in every step."""
    return _watches(type(policy))


def changed_blocks(canvas: Canvas) -> np.ndarray:
    """With block-causal attention: positions from the first block with a token committed in the latest step to the end
    of the current block. After a pass over them, all K/V up to there are those of the current tokens."""
    changed = np.flatnonzero(canvas.committed_at == canvas.step)
    if canvas.step == 0:
        return np.arange(canvas.run_end)
    first = int(changed[0]) if len(changed) else canvas.block_start
    return np.arange(max(0, canvas.attention_block_start(first)), canvas.run_end)


def every_position(canvas: Canvas) -> np.ndarray:
    """All positions of the canvas."""
    return np.arange(canvas.size)
