"""Input and output of a memory policy: plain numbers, no tensors.

A stream's rows are, in order: the chat's header (sinks), carriers of old frames, then frame after frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Protocol

import numpy as np

#: Frames that are evicted together, as far as there are twice as many: rows are renumbered once for all of them.
CHUNK = 8


class Kind(IntEnum):
    """What a row is."""

    SINK = 0  # of the chat's header: always kept
    CARRIER = 1  # represents a frame that was evicted
    LABEL = 2  # text of a frame, such as its time
    VISUAL = 3


@dataclass(frozen=True)
class Rows:
    """The rows that are kept, in order. Shape ``[n]`` each, but for what a policy does not ask for, which is None."""

    kind: np.ndarray  # int8, of ``Kind``
    frame: np.ndarray  # int64, ascending from the first carrier on: number of the frame; -1 of sinks
    norms: np.ndarray | None = None  # float32: L2 norm of the row's keys, mean over layers and heads
    features: np.ndarray | None = None  # float32 [n, D]: visual tokens; of other rows zeros

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def frames(self) -> np.ndarray:
        """Numbers (int64, ascending) of the frames that have rows, carriers left out."""
        return np.unique(self.frame[self.kind >= Kind.LABEL])


@dataclass(frozen=True)
class Left:
    """Which rows stay, and which frames become carriers."""

    keep: np.ndarray  # int64, ascending
    pooled: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # int64, ascending

    def __len__(self) -> int:
        return len(self.keep) + len(self.pooled)


class MemoryPolicy(Protocol):
    """One policy with its numbers; it holds no state of a stream."""

    #: What of ``Rows`` it asks for: ``norms``, ``features``.
    needs: ClassVar[frozenset[str]]

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        """Bool ``[n]``: which visual tokens of a new frame become rows.

        ``before_nD``: the tokens of the frame before, None where there is none of that size; ``number`` of the new one.
        """
        ...

    def left(self, rows: Rows, most: int) -> Left:
        """At most ``most`` rows, or the sinks alone where those are more. Called when there are more than ``most``."""
        ...


def whole_frames(rows: Rows, most: int, *, chunk: int = CHUNK, added: np.ndarray | None = None) -> np.ndarray:
    """Numbers (int64, ascending) of the oldest frames that have to go so that ``most`` rows are left: ``chunk`` of
    them or half of all frames, or more where that is not enough.

    ``added`` (int64, one a frame): how many rows come in once the first so many are dropped; None = none.
    """
    frames = rows.frames
    sizes = np.array([np.count_nonzero((rows.frame == f) & (rows.kind >= Kind.LABEL)) for f in frames], dtype=np.int64)
    left = len(rows) - np.cumsum(sizes) + (0 if added is None else added)  # once the first so many are dropped
    enough = np.flatnonzero(left <= most)
    needed = int(enough[0]) + 1 if len(enough) else len(frames)
    return frames[: max(needed, min(chunk, len(frames) // 2))]


def without(rows: Rows, frames: np.ndarray) -> np.ndarray:
    """Rows (int64, ascending) that are not of ``frames``; carriers stay."""
    return np.flatnonzero((rows.kind <= Kind.CARRIER) | ~np.isin(rows.frame, frames))


def every_row(frame_nD: np.ndarray) -> np.ndarray:
    """``MemoryPolicy.taken`` of policies that take all of a frame."""
    return np.ones(len(frame_nD), dtype=bool)
