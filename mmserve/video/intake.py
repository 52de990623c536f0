"""Processing of frames of one or several streams in batches: through the tower, and in passes over their rows.

Frames go through the tower one by one, so that none depends on others. A failed batch is repeated frame by frame, so
that only the frame that causes the failure fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from mmserve.core.request import Vision
from mmserve.core.stream_state import StreamPayload
from mmserve.errors import Cancelled, Internal, MMServeError
from mmserve.prune.base import Pruner
from mmserve.video.append import append
from mmserve.video.base import EncodedFrame, Frame
from mmserve.video.layout import FrameRows, encode_frame
from mmserve.video.state import PlannedRows, Streaming, StreamState

logger = logging.getLogger("mmserve.video")


@dataclass
class Waiting:
    """A frame to be appended."""

    frame: Frame
    future: Future[EncodedFrame] = field(default_factory=Future)


@dataclass
class Saving:
    """A request for a stream's state after the preceding frames, the newest of which is at ``last`` (seconds)."""

    last: float
    future: Future[StreamPayload] = field(default_factory=Future)


class FrameStream(Protocol):
    """A stream whose frames are processed."""

    vision: Vision
    pruner: Pruner | None
    state: StreamState | None  # None = closed


@dataclass
class _Frame:
    """A frame after the tower, and its rows."""

    state: StreamState
    stream: FrameStream
    waiting: Waiting
    rows: FrameRows
    planned: PlannedRows | None = None


def process_frames(model: Streaming, batch: Sequence[tuple[FrameStream, Waiting]]) -> None:
    """Process the frames of ``batch``, in order for each stream; each future is then done, or has failed."""
    frames: list[_Frame] = []
    for stream, waiting in batch:
        state = stream.state
        try:
            if state is None:
                raise closed()
            rows = encode_frame(model.model, state.units.with_open(waiting.frame), stream.pruner, stream.vision.amount)
            frames.append(_Frame(state, stream, waiting, state.units.chosen(rows)))
        except BaseException as error:  # noqa: BLE001 - of one frame: the others go on
            failed(waiting, error)
    while frames:
        chosen, frames = _next_pass(frames)
        if _run(model, chosen, alone=len(chosen) == 1):
            continue
        for f in chosen:  # repeat one by one: only the frame that causes the failure must fail
            _run(model, _next_pass([f])[0], alone=True)


def _run(model: Streaming, chosen: Sequence[_Frame], *, alone: bool) -> bool:
    """Write the rows of frames and make them visible to questions. Returns False if nothing is written and it can be
    repeated.

    An ``alone`` frame fails instead.
    """
    try:
        append(
            model.model,
            [f.planned.new for f in chosen if f.planned is not None and f.planned.new is not None],
            model.floor,
        )
    except BaseException as error:  # noqa: BLE001
        if not alone:
            logger.warning("a pass of %d frames failed, and is repeated for each of them: %r", len(chosen), error)
            return False
        for f in chosen:
            failed(f.waiting, error)
        return True
    lost: dict[int, BaseException] = {}  # streams with a failed frame, whose later rows cannot be written
    for f in chosen:
        try:
            if (before := lost.get(id(f.state))) is not None:
                raise before
            assert f.planned is not None
            f.state.commit(f.planned, f.rows)
        except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
            lost[id(f.state)] = error
            failed(f.waiting, error)
            continue
        if f.stream.state is None:
            failed(f.waiting, closed())
        elif f.waiting.future.set_running_or_notify_cancel():
            f.waiting.future.set_result(f.rows.seen)
    return True


def _next_pass(frames: list[_Frame]) -> tuple[list[_Frame], list[_Frame]]:
    """The frames of the next pass, and the others: for each stream the first, and those that fit after it."""
    chosen: list[_Frame] = []
    later: list[_Frame] = []
    planned_of: dict[int, PlannedRows] = {}
    full: set[int] = set()
    for f in frames:
        own, state = id(f.state), f.state
        before = planned_of.get(own)
        if own in full or (before is not None and not state.has_room(f.rows, before)):
            full.add(own)
            later.append(f)
            continue
        try:
            if before is None:
                state.make_room(f.rows)
            f.planned = planned_of[own] = state.plan_append(f.rows, before)
        except BaseException as error:  # noqa: BLE001 - of one stream: the others go on
            failed(f.waiting, error)
            continue
        chosen.append(f)
    return chosen, later


def closed() -> Cancelled:
    """The error for frames of a closed stream."""
    return Cancelled("the stream was closed")


def failed(waiting: Waiting | Saving, error: BaseException) -> None:
    """Fail a frame, or a request for a state; a bug becomes ``Internal`` with an id that is also in the log."""
    if waiting.future.done() or not waiting.future.set_running_or_notify_cancel():
        return
    typed = error if isinstance(error, MMServeError) else Internal.logged(error, "a stream's frame", logger)
    waiting.future.set_exception(typed)
