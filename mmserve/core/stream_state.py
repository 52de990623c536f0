"""What is kept of a stream of video, as plain data: what another process needs to go on with it exactly.

Shapes in names: N layers, n rows, G key/value heads, K head size, D width of a visual token, A axes of a position (0
where it is one number), R rows of a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmserve.core.tensors import Tensor


@dataclass(frozen=True)
class RowsState:
    """The rows that are kept: ``table`` has the arrays of ``video.rows.Table``, in their order.

    ``keys``, ``values``: ``[N, final, G, K]`` of the first ``final`` rows, keys before rotation; None where the model
    keeps none. ``features [n, D]``: visual tokens, None where nobody asks for them.
    """

    table: tuple[np.ndarray, ...]
    final: int
    keys: Tensor | None
    values: Tensor | None
    features: Tensor | None


@dataclass(frozen=True)
class FrameState:
    """A frame that has not become rows for good: RGB ``pixels`` (uint8 ``[height, width, 3]``)."""

    seconds: float
    pixels: np.ndarray
    detail: bool


@dataclass(frozen=True)
class UnitsState:
    """What the next frame becomes rows by: as ``video.units.Units``; ``before [R, D]``: visual tokens of the newest
    unit."""

    count: int
    open: tuple[FrameState, ...]
    before: Tensor | None
    first: float
    begun: float
    time: int


@dataclass(frozen=True)
class ArchiveState:
    """Old frames, one after another: of each its number, its seconds (of its first and last frame), frames, rows and
    visual tokens (``counts`` int64 ``[frames, 2]``); the ``ids`` (int64) and ``coordinates`` (``[A, …]``) of all rows,
    and all tokens ``[…, D]``."""

    numbers: np.ndarray
    seconds: np.ndarray  # float64 [frames, 2]
    frames: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    coordinates: np.ndarray
    tokens: Tensor


@dataclass(frozen=True)
class SeenState:
    """One of the latest frames, by its number in the stream, for standing questions: as ``video.base.Seen``."""

    number: int
    seconds: float
    tokens: Tensor
    whole: Tensor


@dataclass(frozen=True)
class StreamPayload:
    """A stream after some frame.

    ``frames``, ``evicted``: counters; ``last``: seconds of the newest frame. ``open``, ``open_tokens [k, D]``: number
    and visual tokens of a unit that its next frame replaces, None where there is none. ``number``: of the newest frame
    as who keeps the stream elsewhere counts them.
    """

    rows: RowsState
    frames: int
    evicted: int
    last: float
    units: UnitsState
    open: int | None = None
    open_tokens: Tensor | None = None
    archive: ArchiveState | None = None
    seen: tuple[SeenState, ...] = ()
    number: int = 0
