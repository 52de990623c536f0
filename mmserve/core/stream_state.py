"""The state of a video stream as plain data, from which another process can continue it exactly.

Shapes in names: N layers, n rows, G key/value heads, K head size, D width of a visual token, A position axes (0 if
positions are single numbers), R rows of a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.tensors import Tensor


@dataclass(frozen=True)
class RowsState:
    """The rows of a stream: ``table`` has the arrays of ``video.rows.Table``, in that order.

    ``keys``, ``values``: ``[N, final, G, K]`` of the first ``final`` rows, keys before rotation; None if the model
    keeps none. ``features [n, D]``: visual tokens; None if not needed.
    """

    table: tuple[np.ndarray, ...]
    final: int
    keys: Tensor | None
    values: Tensor | None
    features: Tensor | None


@dataclass(frozen=True)
class FrameState:
    """A frame whose rows are not final: RGB ``pixels`` (uint8 ``[height, width, 3]``)."""

    seconds: float
    pixels: np.ndarray
    detail: bool


@dataclass(frozen=True)
class UnitsState:
    """State for making rows of the next frame (see ``video.units.Units``); ``before [R, D]``: visual tokens of the
    newest unit."""

    count: int
    open: tuple[FrameState, ...]
    before: Tensor | None
    first: float
    begun: float
    time: int


@dataclass(frozen=True)
class ArchiveState:
    """Archived frames: for each its number, its time range (seconds of first and last frame), and its counts of rows
    and visual tokens (``counts`` int64 ``[frames, 2]``); the ``ids`` (int64) and ``coordinates`` (``[A, …]``) of all
    rows, and all tokens ``[…, D]``, concatenated."""

    numbers: np.ndarray
    seconds: np.ndarray  # float64 [frames, 2]
    frames: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    coordinates: np.ndarray
    tokens: Tensor


@dataclass(frozen=True)
class EncodedFrameState:
    """One of the latest frames, by its number in the stream, for standing questions (see
    ``video.base.EncodedFrame``)."""

    number: int
    seconds: float
    tokens: Tensor
    whole: Tensor


@dataclass(frozen=True)
class StreamPayload:
    """A stream after one of its frames.

    ``frames``, ``evicted``: counters; ``last``: seconds of the newest frame. ``open``, ``open_tokens [k, D]``: number
    and visual tokens of a unit that its next frame replaces; None if there is none. ``number``: the newest frame's
    number as counted by the owner of the stream.
    """

    rows: RowsState
    frames: int
    evicted: int
    last: float
    units: UnitsState
    open: int | None = None
    open_tokens: Tensor | None = None
    archive: ArchiveState | None = None
    seen: tuple[EncodedFrameState, ...] = ()
    number: int = 0
