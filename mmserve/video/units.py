"""Assigns the next frame of a stream to a unit (a new one, or the current one), with its number and time position.

Not thread-safe.
"""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch import Tensor

from mmserve.core.stream_state import FrameState, UnitsState
from mmserve.models.base import LoadedModel
from mmserve.video.base import Frame
from mmserve.video.layout import FrameRows
from mmserve.video.memory import MemoryPolicy


class Units:
    """Counts the units of a stream, and assigns time positions if the model has several position axes.

    ``policy`` selects the visual tokens that become rows. ``rows``, ``positions``: maximum numbers of a stream.
    """

    def __init__(self, model: LoadedModel, policy: MemoryPolicy, rows: int, positions: int) -> None:
        self._model, self._policy, self._rows, self._positions = model, policy, rows, positions
        self._count = 0
        self._open: tuple[Frame, ...] = ()  # frames of an incomplete unit
        self._before: Tensor | None = None  # visual tokens of the newest complete unit
        self._first = self._begun = 0.0  # seconds of the first frame, and of the newest unit
        self._time = 0  # time position of the newest unit

    def with_open(self, frame: Frame) -> tuple[Frame, ...]:
        """The next frame, preceded by the frames of the same unit."""
        return (*self._open, frame)

    def chosen(self, rows: FrameRows) -> FrameRows:
        """The rows of the next frame that the policy selects, with number and time position."""
        if not self._open:
            self._begin(rows)
        number, tokens, before = self._count - 1, rows.seen.tokens_RD, self._before
        if rows.detail and len(rows.tokens_kD) == len(tokens):  # otherwise a pruner has selected
            known = before is not None and before.shape == tokens.shape
            old = _array(before) if before is not None and known else None
            rows = rows.with_tokens(self._policy.taken(old, _array(tokens), number))
        if not rows.open:
            self._before = tokens
        self._open = rows.frames if rows.open else ()
        return rows.at(number, self._time)

    def saved(self) -> UnitsState:
        """The state for ``restore``."""
        frames = (FrameState(f.seconds, np.array(f.image.convert("RGB")), f.detail) for f in self._open)
        return UnitsState(self._count, tuple(frames), self._before, self._first, self._begun, self._time)

    def restore(self, saved: UnitsState) -> None:
        """Restore a saved state."""
        self._open = tuple(Frame(f.seconds, Image.fromarray(f.pixels), f.detail) for f in saved.open)
        self._count, self._first, self._begun, self._time = saved.count, saved.first, saved.begun, saved.time
        self._before = None if saved.before is None else saved.before.to(self._model.device)

    def _begin(self, rows: FrameRows) -> None:
        """Start the next unit with ``rows``."""
        number, begin, vision = self._count, rows.unit.begin, self._model.vision
        self._count += 1
        if self._model.position_axes == 1 or vision is None:
            return
        if not number:
            self._first = self._begun = begin
            return
        step = vision.stream_time(number, begin - self._first)
        step -= vision.stream_time(number - 1, self._begun - self._first)
        # Bounded even after a long pause: all kept units must stay within the model's positions.
        self._time += min(step, max(1, self._positions // max(1, self._rows // len(rows.ids))))
        self._begun = begin


def _array(x: Tensor) -> np.ndarray:
    found: np.ndarray = x.float().cpu().numpy()
    return found
