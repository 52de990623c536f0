"""The interface of memory policies: plain numbers, no tensors.

A stream's rows are, in order: the chat's header (sinks), carriers of evicted frames, then frame after frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Protocol

import numpy as np

#: Number of frames that are evicted together if there are at least twice as many: rows are renumbered once for all.
CHUNK = 8


class Kind(IntEnum):
    """The kind of a row."""

    SINK = 0  # of the chat's header: never evicted
    CARRIER = 1  # represents a frame that was evicted
    LABEL = 2  # text of a frame, such as its timestamp
    VISUAL = 3


@dataclass(frozen=True)
class Rows:
    """The kept rows, in order. All of shape ``[n]``; None if the policy does not need them."""

    kind: np.ndarray  # int8, of ``Kind``
    frame: np.ndarray  # int64, ascending from the first carrier on: number of the frame; -1 for sinks
    norms: np.ndarray | None = None  # float32: L2 norm of the row's keys, mean over layers and heads
    features: np.ndarray | None = None  # float32 [n, D]: visual tokens; zeros for other rows

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def frames(self) -> np.ndarray:
        """Numbers (int64, ascending) of the frames that have rows, without carriers."""
        return np.unique(self.frame[self.kind >= Kind.LABEL])


@dataclass(frozen=True)
class Retained:
    """The rows that are kept, and the frames that become carriers."""

    keep: np.ndarray  # int64, ascending
    pooled: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # int64, ascending

    def __len__(self) -> int:
        return len(self.keep) + len(self.pooled)


class MemoryPolicy(Protocol):
    """One policy with its parameters; holds no state of a stream."""

    #: The fields of ``Rows`` that it needs: ``norms``, ``features``.
    needs: ClassVar[frozenset[str]]

    def taken(self, before_nD: np.ndarray | None, frame_nD: np.ndarray, number: int) -> np.ndarray:
        """Bool ``[n]``: which visual tokens of a new frame become rows.

        ``before_nD``: the tokens of the previous frame, None if there is none of the same size; ``number``: of the new
        frame.
        """
        ...

    def retain(self, rows: Rows, most: int) -> Retained:
        """Selects at most ``most`` rows to keep, or only the sinks if those are more. Called if there are more than
        ``most``."""
        ...


def whole_frames(rows: Rows, most: int, *, chunk: int = CHUNK, added: np.ndarray | None = None) -> np.ndarray:
    """Numbers (int64, ascending) of the oldest frames to evict so that at most ``most`` rows are left: ``chunk`` of
    them or half of all frames, or more if that is not enough.

    ``added`` (int64, one for each frame): number of rows added when the frames up to that one are evicted; None =
    none.
    """
    frames = rows.frames
    sizes = np.array([np.count_nonzero((rows.frame == f) & (rows.kind >= Kind.LABEL)) for f in frames], dtype=np.int64)
    left = len(rows) - np.cumsum(sizes) + (0 if added is None else added)  # after evicting the frames up to each
    enough = np.flatnonzero(left <= most)
    needed = int(enough[0]) + 1 if len(enough) else len(frames)
    return frames[: max(needed, min(chunk, len(frames) // 2))]


def without(rows: Rows, frames: np.ndarray) -> np.ndarray:
    """Rows (int64, ascending) that are not of ``frames``; carriers are kept."""
    return np.flatnonzero((rows.kind <= Kind.CARRIER) | ~np.isin(rows.frame, frames))


def every_row(frame_nD: np.ndarray) -> np.ndarray:
    """``MemoryPolicy.taken`` of policies that keep all tokens of a frame."""
    return np.ones(len(frame_nD), dtype=bool)
